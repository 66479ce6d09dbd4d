"""What the ledger keeps, and that readers get only what is durable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.ledger_world import SAMPLING, Incarnation, events_of, rows

from rose.engines.base import Request
from rose.errors import RequestRefused
from rose.gateway import ledger
from rose.gateway import trajectory_table as trajectories
from rose.gateway.ledger import NoLedger
from rose.gateway.sessions import Finish

HUGE = 2**70


def test_readers_get_only_what_is_durable(path: Path) -> None:
    gateway = Incarnation(path)
    whole, stream = gateway.ask("s", 1), gateway.ask("s", 1, whole=False)
    gateway.says(5)
    gateway.says(6, end="stop")
    assert events_of(whole) == events_of(stream) == []
    gateway.core.ledger.commit()
    assert [event.token_ids for event in events_of(whole)] == [(5, 6)]
    assert [event.token_ids for event in events_of(stream)] == [(5,), (6,)]
    late = gateway.ask("s", 1)
    assert [event.token_ids for event in events_of(late)] == [(5, 6)], "what is durable is told at once"


def test_a_batch_stays_the_same_until_it_is_taken_and_then_its_rows_go(path: Path) -> None:
    gateway = Incarnation(path)
    for name, group in (("b1", "b"), ("a1", "a")):
        gateway.play(name, group)
    batch = gateway.core.trajectories.batch(2, 0)
    assert batch is not None and [group.group for group in batch.groups] == ["b", "a"], (
        "in the order they were complete"
    )
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    assert gateway.core.trajectories.batch(2, 0) == batch
    gateway.play("b2", "b")  # a name that is used again meanwhile
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    assert gateway.core.trajectories.batch(2, 0) == batch
    following = gateway.core.trajectories.batch(1, 1)
    assert following is not None and following.batch == 2 and following.groups[0].trajectories[0].trajectory_id == "b2"
    assert gateway.core.trajectories.batch(1, 2) is None
    gateway.core.ledger.commit()
    assert rows(path, "turns") == rows(path, "groups") == 0
    gateway.kill()
    gateway = Incarnation(path)
    assert gateway.core.finish("a1", Finish(1.0, True), 0.0).turn_count == 2, "how it ended is remembered"
    assert gateway.core.trajectories.begin("a1", 0.0, group="a").finish is not None, "and that it had begun"


def test_what_is_remembered_of_the_past_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "REMEMBERED_MAX", 3)
    gateway = Incarnation(path)
    for number in range(10):
        gateway.play(f"t{number}", f"g{number}")
        assert gateway.core.trajectories.batch(1, number) is not None
    for number in range(10):
        gateway.core.trajectories.open(f"s{number}", 0.0)
        gateway.core.finish(f"s{number}", Finish(), 0.0)
    gateway.core.ledger.commit()
    assert rows(path, "sessions") <= 3 + 1 and rows(path, "groups") == 1


def test_numbers_of_two_incarnations_differ(path: Path) -> None:
    seen: set[int] = set()
    for _ in range(3):
        gateway = Incarnation(path)
        gateway.ask("s", 1)
        assert gateway.turns[-1].attempt_id not in seen and gateway.member.lease.number not in seen
        seen |= {gateway.turns[-1].attempt_id, gateway.member.lease.number}
        gateway.kill()
    assert NoLedger().first_number != NoLedger().first_number


def test_ids_of_ended_trajectories_are_kept_in_a_ring(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "REMEMBERED_MAX", 2)
    monkeypatch.setattr(ledger, "ENDED_MAX", 8)
    gateway = Incarnation(path)
    for number in range(20):
        gateway.play(f"t{number}", f"g{number}")
        gateway.core.trajectories.batch(1, number)
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    assert rows(path, "ended") == 8 and rows(path, "sessions") <= 3
    for number in range(12, 17):
        with pytest.raises(RequestRefused, match="has finished"):
            gateway.core.trajectories.begin(f"t{number}", 0.0, group="again")
    gateway.core.trajectories.begin("t3", 0.0, group="again")
    gateway.play("t99", "g99")
    with pytest.raises(RequestRefused, match="another group"):
        gateway.core.trajectories.begin("t99", 0.0, group="other")


def test_a_conversation_with_integers_of_any_size_is_kept(path: Path) -> None:
    gateway = Incarnation(path)
    session = gateway.core.trajectories.open("talk", 0.0)
    turn, _ = session.turn_of((1,), SAMPLING, None)
    said = [{"role": "tools", "tools": [{"maximum": HUGE}]}, {"role": "user", "content": "\ud800 and \u00e9"}]
    turn.hold_messages(said, 100)
    gateway.ask("talk", 1)
    gateway.says(5, end="stop")
    gateway.core.ledger.commit()
    gateway.kill()
    restored = Incarnation(path).core.trajectories.get("talk")
    assert restored is not None and restored.turns[0].messages == said


def test_a_turn_that_the_ledger_refuses_does_not_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Incarnation(path)

    def refuse(turn: Any, request: Request) -> None:
        raise RequestRefused("cannot be kept")

    with monkeypatch.context() as patched:
        patched.setattr(gateway.ledger, "start_turn", refuse)
        with pytest.raises(RequestRefused):
            gateway.ask("s", 1)
    assert not gateway.turns and not gateway.core.scheduler.waiting
    reader = gateway.ask("s", 1)
    gateway.says(5, end="stop")
    gateway.core.ledger.commit()
    assert [event.token_ids for event in events_of(reader)] == [(5,)]
