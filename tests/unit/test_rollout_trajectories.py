"""Turns, forks, groups and batches: each once."""

from __future__ import annotations

from typing import Any

import pytest

from rose.engines.base import Sampling, TokenEvent
from rose.errors import QueueFull, RequestRefused
from rose.rollout.branches import branches
from rose.rollout.sessions import Finish, KeptTurn, Session, digest, hash_prompt
from rose.rollout.trajectories import Trajectories

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


def test_dice_come_from_the_trajectorys_seed_unless_the_turn_has_its_own() -> None:
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


def test_a_group_is_handed_out_once_it_is_complete_and_until_it_was_had() -> None:
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


def test_finishing_twice_counts_once() -> None:
    kept = books()
    begin(kept, "a", size=1)
    kept.finish("a", Finish(1.0), 0.0)
    kept.finish("a", Finish(1.0), 0.0)
    assert kept.finished == 1 and kept.complete_groups == 1
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


def test_a_turn_cut_in_two_by_new_weights_keeps_both_spans_and_can_be_cut() -> None:
    turn = KeptTurn("k", 0, (1,), None)
    turn.produced.add((1, 2), (-1.0, -1.0), "0")
    turn.produced.add((3, 4), (-1.0, -1.0), "1")
    events = turn.produced.events("r", "1", "length")
    assert [(event.token_ids, event.version, event.finish_reason) for event in events] == [
        ((1, 2), "0", None),
        ((3, 4), "1", "length"),
    ]
    turn.produced.cut(3)
    assert turn.produced.token_ids == [1, 2, 3]
    assert [(span.version, span.start, span.end) for span in turn.produced.spans] == [("0", 0, 2), ("1", 2, 3)]
