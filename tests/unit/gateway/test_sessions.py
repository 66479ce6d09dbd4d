"""Turns of one trajectory: identity, seeds, branches, and the bound on memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.unit.ledger_world import alone

from rose.engines.base import Sampling, TokenEvent
from rose.errors import QueueFull
from rose.gateway.sessions import Finish, KeptTurn, MemoryLimit, Session, branches, digest, hash_prompt
from rose.gateway.trajectory_table import Trajectories

SAMPLING = Sampling(max_tokens=4)


def books(**changes: Any) -> Trajectories:
    return Trajectories(**({"most": 100, "idle_s": 50.0} | changes))


def begin(kept: Trajectories, name: str, group: str | None = "g", size: int = 2) -> Session:
    return kept.begin(name, 0.0, group=group, group_size=size, task="task", seed=3)


def answer(turn: KeptTurn, *token_ids: int, version: str = "0") -> None:
    turn.produced.add(token_ids, [-0.25] * len(token_ids), version)
    turn.put(TokenEvent("x", (), (), version, "stop"))


def play(session: Session, *, turns: int = 1) -> None:
    prompt: tuple[int, ...] = (1, 2)
    for number in range(turns):
        turn, _ = session.turn_of(prompt, SAMPLING, None)
        answer(turn, 10 + number, 11 + number)
        prompt = (*turn.prompt_ids, *turn.produced.token_ids, 3)


def test_what_agents_make_the_gateway_keep_is_bounded(path: Path) -> None:
    gateway = alone(path, max_kept_mb=1, max_session_mb=1)
    prompt = tuple(range(6000))
    for number in range(4):
        gateway.ask(f"s{number}", *prompt)
    with pytest.raises(QueueFull, match="max_kept_mb") as full:
        gateway.ask("more", *prompt)
    assert full.value.retry_after_s > 0
    gateway.core.finish("s0", Finish(), 0.0)
    gateway.ask("more", *prompt)
    gateway.core.ledger.commit()
    used = gateway.core.trajectories.room.used_bytes
    gateway.kill()
    gateway = alone(path, max_kept_mb=10, max_session_mb=1)
    assert gateway.core.trajectories.room.used_bytes == used
    for number in range(3):
        gateway.ask("s1", number, *prompt)
    with pytest.raises(QueueFull, match="max_session_mb"):
        gateway.ask("s1", 7, *prompt)
    for name in ("s1", "s2", "s3", "more"):
        gateway.core.finish(name, Finish(), 0.0)
    assert gateway.core.trajectories.room.used_bytes == 0


def test_the_same_request_is_the_same_turn() -> None:
    session = begin(books(), "a")
    turn, seed = session.turn_of((1, 2), SAMPLING, None)
    assert session.turn_of((1, 2), SAMPLING, None) == (turn, seed)
    assert turn.key.startswith("a/0-")
    others = [((1, 3), SAMPLING, None), ((1, 2), Sampling(max_tokens=5), None), ((1, 2), SAMPLING, 9)]
    for number, other in enumerate(others, start=1):
        another, dice = session.turn_of(*other)
        assert another is not turn and another.ordinal == number and dice != seed


def test_the_digest_is_the_same_with_and_without_the_hash_of_the_parent() -> None:
    """The ledger keeps digests and no hashes: after a restart, the same request must find its turn."""
    session = begin(books(), "a")
    play(session, turns=3)
    last = session.turns[-1]
    assert last.parent is not None and last.prompt_hash is not None
    assert last.digest == digest(hash_prompt(last.prompt_ids, None), SAMPLING, None, ())
    for turn in session.turns:
        turn.prompt_hash = None
    assert session.turn_of(last.prompt_ids, SAMPLING, None)[0] is last


def test_another_demand_is_another_turn_and_none_is_what_older_ledgers_hold() -> None:
    session = begin(books(), "a")
    plain, _ = session.turn_of((1, 2), SAMPLING, None)
    assert plain.digest == "dc924b1f117adddd64641c17"
    demands: tuple[dict[str, Any], ...] = (
        {"weight_version": "1"},
        {"min_weight_version": "1"},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 1},
    )
    turns = {session.turn_of((1, 2), structs.replace(SAMPLING, **demand), None)[0] for demand in demands}
    assert len(turns | {plain}) == 5


def test_log_probabilities_of_a_prompt_count_before_they_are_computed() -> None:
    kept = books(room=MemoryLimit(1 << 20, 1 << 20))
    session = begin(kept, "a")
    scored = structs.replace(SAMPLING, prompt_logprobs=20)
    session.turn_of(tuple(range(200)), scored, None)
    assert kept.room.used_bytes == session.size_bytes > 200 * 20 * 100
    with pytest.raises(QueueFull):
        session.turn_of(tuple(range(400)), scored, None)
    session.clear()
    assert kept.room.used_bytes == 0


def test_seeds_follow_from_the_trajectory_unless_the_turn_has_its_own() -> None:
    first, second = begin(books(), "a"), begin(books(), "b")
    assert first.turn_of((1,), SAMPLING, None)[1] == second.turn_of((1,), SAMPLING, None)[1]
    assert first.turn_of((1,), SAMPLING, 77)[1] == 77


def test_a_trajectory_is_one_line_of_tokens() -> None:
    session = begin(books(), "a")
    play(session, turns=2)
    session.close(Finish(1.0, True))
    [found] = branches(session, "g")
    assert found.token_ids == (1, 2, 10, 11, 3, 11, 12)
    assert found.loss_mask == (False, False, True, True, False, True, True)
    assert found.logprobs == (0.0, 0.0, -0.25, -0.25, 0.0, -0.25, -0.25)
    assert found.versions == ("", "", "0", "0", "", "0", "0")
    assert (found.reward, found.is_success, found.turns, session.forks) == (1.0, True, 2, 0)


def test_a_fork_makes_a_branch_and_no_token_is_learnt_twice() -> None:
    session = begin(books(), "a")
    play(session, turns=2)
    fork, _ = session.turn_of((1, 2, 10, 11, 4), SAMPLING, None)  # goes on from the first turn in another way
    answer(fork, 20, version="1")
    stranger, _ = session.turn_of((9, 9), SAMPLING, None)
    answer(stranger, 30)
    session.close(Finish())
    found = branches(session, "g")
    assert [branch.trajectory_id for branch in found] == ["a", "a~1", "a~2"]
    assert found[1].token_ids == (1, 2, 10, 11, 4, 20) and found[1].loss_mask == (False,) * 5 + (True,)
    assert found[2].token_ids == (9, 9, 30)
    assert sum(branch.generated_tokens for branch in found) == 6 and session.forks == 2
