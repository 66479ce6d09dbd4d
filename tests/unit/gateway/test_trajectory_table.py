"""Trajectories, groups and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.ledger_world import Incarnation

from rose.engines.base import Sampling, TokenEvent
from rose.errors import QueueFull, RequestRefused
from rose.gateway.sessions import Finish, KeptTurn, MemoryLimit, Session
from rose.gateway.trajectory_table import RECORD_TOKEN_BYTES, Trajectories

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


def test_a_finished_trajectory_never_belongs_to_a_later_group(path: Path) -> None:
    gateway = Incarnation(path)
    gateway.play("a", "A")
    assert gateway.core.trajectories.batch(1, 0) is not None and gateway.core.trajectories.batch(1, 1) is None
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    gateway.core.trajectories.begin("b", 0.0, group="B", group_size=2)
    gateway.core.ledger.commit()
    gateway.kill()
    gateway = Incarnation(path)
    again = gateway.core.trajectories.begin("a", 0.0, group="A")
    assert again.finish is not None and again.group is None


def test_a_trainer_ahead_of_the_gateway_is_refused(path: Path) -> None:
    gateway = Incarnation(path)
    for name in ("a", "b"):
        gateway.play(name, name)
    with pytest.raises(RequestRefused, match="no batch 5"):
        gateway.core.trajectories.batch(1, 5)
    first = gateway.core.trajectories.batch(1, 0)
    assert first is not None and first.groups[0].group == "a" and gateway.core.trajectories.batch(1, 0) == first


def test_a_complete_group_is_handed_out_until_it_is_confirmed() -> None:
    kept = books()
    for name in ("a", "b"):
        play(begin(kept, name))
    kept.finish("a", Finish(1.0), 0.0)
    assert kept.batch(1, 0) is None
    kept.finish("b", Finish(0.0), 0.0)
    batch = kept.batch(1, 0)
    assert (
        batch is not None and batch.batch == 1 and [t.trajectory_id for t in batch.groups[0].trajectories] == ["a", "b"]
    )
    assert kept.batch(1, 0) is batch, "its answer may have been lost"
    assert kept.batch(1, 1) is None and len(kept) == 0
    with pytest.raises(RequestRefused, match="taken before"):
        kept.batch(1, 0)
    assert kept.finish("a", Finish(1.0), 0.0).turn_count == 1, "a late repetition is still recognised"
    assert kept.finished == 2


def test_tokens_of_a_confirmed_batch_leave_the_memory() -> None:
    kept = books()
    session = begin(kept, "a", size=1)
    play(session)
    kept.finish("a", Finish(1.0), 0.0)
    kept.batch(1, 0)
    kept.batch(1, 1)
    assert kept.get("a") is session and session.group_id == "g", "the outcome is remembered, and the group's name"
    assert session.group is not None and session.group.finished is None and not session.group.members


def test_tokens_count_against_the_memory_limit_until_the_trainer_has_them() -> None:
    kept = books(room=MemoryLimit(RECORD_TOKEN_BYTES * 10))
    for name in ("a", "b"):
        play(begin(kept, name, group=name, size=1))
        kept.finish(name, Finish(1.0), 0.0)
    used = kept.room.used_bytes
    assert used == RECORD_TOKEN_BYTES * 8, "two complete groups of four tokens"
    with pytest.raises(QueueFull, match="take batches"):
        begin(kept, "c", group=None).turn_of(tuple(range(10)), SAMPLING, None)
    assert kept.batch(1, 0) is not None and kept.room.used_bytes == used, "the trainer may ask for it again"
    assert kept.batch(1, 1) is not None and kept.room.used_bytes == used / 2
    assert kept.batch(1, 2) is None and kept.room.used_bytes == 0


def test_finishing_twice_counts_once() -> None:
    kept = books()
    begin(kept, "a", size=1)
    kept.finish("a", Finish(1.0), 0.0)
    kept.finish("a", Finish(1.0), 0.0)
    assert kept.finished == 1 and len(kept._complete) == 1
    with pytest.raises(RequestRefused):
        kept.finish("a", Finish(0.5), 0.0)
    with pytest.raises(RequestRefused):
        kept.open("a", 0.0)
    with pytest.raises(KeyError):
        kept.finish("unknown", Finish(), 0.0)


def test_beginning_twice_begins_once_and_groups_do_not_grow() -> None:
    kept = books()
    assert begin(kept, "a") is begin(kept, "a")
    begin(kept, "b")
    for name, group, size in (("c", "g", 2), ("a", "other", 2)):
        with pytest.raises(RequestRefused):
            begin(kept, name, group, size)


def test_lost_and_forgotten_members_do_not_hold_up_their_group() -> None:
    kept = books()
    play(begin(kept, "a"))
    begin(kept, "b")
    kept.finish("a", Finish(1.0), 40.0)
    assert [session.trajectory_id for session in kept.idle(60.0)] == ["b"]
    kept.finish("b", Finish(is_lost=True), 60.0)
    batch = kept.batch(1, 0)
    assert batch is not None and batch.groups[0].lost == 1 and len(batch.groups[0].trajectories) == 1


def test_trajectories_are_bounded() -> None:
    kept = books(most=1)
    kept.open("a", 0.0)
    with pytest.raises(QueueFull):
        kept.open("b", 0.0)
    kept.finish("a", Finish(), 0.0)
    assert kept.open("b", 0.0).trajectory_id == "b"
