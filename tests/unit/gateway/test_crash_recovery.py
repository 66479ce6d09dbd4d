"""A gateway that is killed continues from its ledger."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from msgspec import structs
from tests.unit.ledger_world import SAMPLING, Incarnation, alone, events_of, under_way

from rose.api.worker_messages import Heartbeat, NewVersion, TokensAdded, TurnTokens
from rose.errors import ConfigError, QueueFull, Unavailable


def test_a_running_turn_continues_from_what_was_received(path: Path) -> None:
    gateway = Incarnation(path)
    gateway.ask("s", 1, 2)
    gateway.says(5, 6, top=(((5, -0.5), (7, -1.0)), ((6, -0.6), (8, -1.1))))
    gateway.core.ledger.commit()
    gateway.says(7)  # is lost with the gateway
    first = gateway.turns[-1]
    gateway.kill()
    gateway = Incarnation(path)
    [turn] = gateway.turns
    assert turn.request.partial.token_ids == (5, 6) and turn.request.partial.logprobs == (-0.5, -0.1 * 6)
    assert turn.request.sampling == first.request.sampling and turn.request.prompt_ids == (1, 2)
    assert turn.attempt_id > first.attempt_id
    reader = gateway.ask("s", 1, 2)
    gateway.says(9, end="stop", top=(((9, -0.9),),))
    gateway.core.ledger.commit()
    [event] = events_of(reader)
    assert event.token_ids == (5, 6, 9) and event.finish_reason == "stop" and len(event.top_logprobs) == 3
    assert event.workers == ("a",)
    assert len(gateway.turns) == 1, "the repeated request found its turn"


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_demand_and_the_log_probabilities_of_a_prompt_survive(path: Path, has_ended: bool) -> None:
    asked = structs.replace(SAMPLING, prompt_logprobs=1, min_weight_version="0")
    scores = ((-1.0, 2, ((4, -0.5),)), (-2.0, 1, ((3, -2.0),)))
    gateway = Incarnation(path)
    gateway.ask("s", 1, 2, 3, sampling=asked)
    gateway.says(5, end="stop" if has_ended else None, scores=scores)
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    reader = gateway.ask("s", 1, 2, 3, sampling=asked)
    if not has_ended:
        [turn] = gateway.turns
        assert structs.replace(turn.request.sampling, seed=0) == asked
        assert turn.request.partial.token_ids == (5,)
        gateway.says(6, end="stop")
    gateway.core.ledger.commit()
    [event] = events_of(reader)
    assert event.token_ids == ((5,) if has_ended else (5, 6)) and event.prompt_logprobs == scores


def test_turns_that_run_beside_each_other_come_back_in_their_order(path: Path) -> None:
    gateway = Incarnation(path)
    gateway.ask("s", 1, 2)
    first = gateway.turns[-1].attempt_id
    gateway.ask("s", 1, 3)
    gateway.says(6, end="stop")
    gateway.core.receive(gateway.member, TokensAdded((TurnTokens(first, (5,), (-0.5,), "0", None),)), 0.0)
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    session = gateway.core.trajectories.get("s")
    assert session is not None and [turn.ordinal for turn in session.turns] == [0, 1]
    assert [turn.finish_reason for turn in session.turns] == [None, "stop"]
    assert [turn.request.partial.token_ids for turn in gateway.turns] == [(5,)]
    assert session.turn_of((1, 4), SAMPLING, None)[0].ordinal == 2


def test_an_answer_lost_in_transit_is_repeated_after_a_restart(path: Path) -> None:
    gateway = Incarnation(path)
    gateway.ask("s", 1, 2)
    gateway.says(5, 6, end="stop")
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    again = gateway.ask("s", 1, 2)
    [event] = events_of(again)
    assert (event.token_ids, event.finish_reason, event.cached_tokens) == ((5, 6), "stop", 2) and not gateway.turns
    gateway.ask("s", 1, 2, 5, 6, 7)
    session = gateway.core.trajectories.get("s")
    assert session is not None and session.turns[1].parent is session.turns[0], "and what follows goes on from it"


def test_conversations_are_known_after_a_restart(path: Path) -> None:
    gateway = Incarnation(path)
    opening = [{"role": "user", "content": "hello"}]
    session = gateway.core.trajectories.open("talk", 0.0)
    for number, prompt_ids in enumerate([(1,), (1, 5, 6, 2)]):
        turn, _ = session.turn_of(prompt_ids, SAMPLING, None)
        turn.messages = opening + [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "?"}] * number
        gateway.ask("talk", *prompt_ids)
        gateway.says(5, 6, 7, end="length")
        gateway.core.cut(turn, 2, 0.0)
        turn.reply_text = "hi"
    gateway.kill()
    restored = Incarnation(path).core.trajectories.get("talk")
    assert restored is not None
    assert [turn.messages for turn in restored.turns] == [turn.messages for turn in session.turns]
    assert [turn.reply_text for turn in restored.turns] == ["hi", "hi"]
    assert [turn.produced.token_ids for turn in restored.turns] == [[5, 6], [5, 6]]
    assert [turn.finish_reason for turn in restored.turns] == ["stop", "stop"]


def test_published_versions_are_requested_after_a_restart(path: Path) -> None:
    gateway = Incarnation(path, max_staleness=1)
    for name in ("v1", "v2", "v3"):
        gateway.core.publish(NewVersion(name, "folder", hash=f"hash of {name}"), 0.0)
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path, max_staleness=1)
    assert [version.hash for version in gateway.core.pool.published] == ["hash of v2", "hash of v3"]
    assert gateway.told == [NewVersion("v3", "folder", hash="hash of v3")]


def test_a_refused_turn_does_not_run_after_a_restart(path: Path) -> None:
    gateway = alone(path, max_waiting=2)
    refused = 0
    for number in range(100):
        try:
            gateway.ask(f"s{number}", 1, 2, 3)
        except QueueFull:
            refused += 1
            session = gateway.core.trajectories.get(f"s{number}")
            assert session is not None and not session.turns and not session.size_bytes
    gateway.core.ledger.commit()
    assert refused == 98
    gateway.kill()
    assert under_way(alone(path, max_waiting=2)) == 2


def test_a_turn_that_waited_too_long_runs_only_when_requested_again(path: Path) -> None:
    gateway = Incarnation(path, wait_s=1.0)
    gateway.ask("with", 1)
    gateway.says(5, 6)
    gateway.core.receive(gateway.member, Heartbeat(1, 0, 0, 10_000, "0", False), 0.0)
    gateway.says(end="abort")
    without = gateway.ask("without", 1)
    gateway.core.tick(0.5)
    gateway.core.tick(2.0)
    assert isinstance(without._error, Unavailable) and not gateway.core.scheduler.waiting
    gateway.core.ledger.commit()
    gateway.kill()
    for _ in range(2):
        gateway = Incarnation(path, wait_s=1.0)
        assert not gateway.turns, "no client is owed an answer"
        kept, forgotten = (gateway.core.trajectories.get(name) for name in ("with", "without"))
        assert kept is not None and kept.turns[0].produced.token_ids == [5, 6]
        assert forgotten is not None and not forgotten.turns
        gateway.core.ledger.commit()
        gateway.kill()
    gateway = Incarnation(path)
    reader = gateway.ask("with", 1)
    assert gateway.turns[-1].request.partial.token_ids == (5, 6)
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    assert gateway.turns[-1].request.partial.token_ids == (5, 6), "it was under way again when the gateway died"
    reader = gateway.ask("with", 1)
    gateway.says(7, end="stop")
    gateway.core.ledger.commit()
    assert [event.token_ids for event in events_of(reader)] == [(5, 6, 7)]


def test_a_turn_requested_again_keeps_its_seed(path: Path) -> None:
    gateway = alone(path, max_waiting=0)
    for _ in range(3):
        with pytest.raises(QueueFull):
            gateway.ask("s", 1)
    gateway.kill()
    gateway = Incarnation(path)
    gateway.ask("s", 1)
    seed = gateway.turns[-1].request.sampling.seed
    other = Incarnation(path.with_name("other"))
    other.ask("s", 1)
    assert other.turns[-1].request.sampling.seed == seed


@pytest.mark.parametrize("statement", [
    "UPDATE log SET entries = x'05000000c1c1c1c1c1'",
    "UPDATE log SET entries = x'0400000093a16201'",
    "UPDATE sessions SET finish = x'c1'",
    "INSERT INTO meta VALUES ('versions', x'91a1ff')",
    "UPDATE turns SET answer = x'95919191'",
    "UPDATE turns SET prompt = x'010203'",
    "UPDATE turns SET messages = x'ff'",
])  # fmt: skip
def test_a_damaged_ledger_is_refused_with_a_reason(path: Path, statement: str) -> None:
    gateway = Incarnation(path)
    gateway.play("t", "g", size=2)
    gateway.ask("s", 1)
    gateway.core.ledger.commit()
    gateway.kill()
    with sqlite3.connect(path) as database:
        database.execute(statement)
    with pytest.raises(ConfigError, match="is damaged"):
        Incarnation(path)
