"""Stories of one placement each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.core.router import Place, TurnView, Wait, WorkerView, choose

NOW_S = 100.0
A = WorkerView("a", is_dedicated=True, is_open=True, turns=1, seats=4, tokens_held=100, kv_tokens=1000)
B = replace(A, name="b", is_dedicated=False)
TURN = TurnView(tokens_max=100)


@pytest.mark.parametrize(
    "story, turn, workers, worker",
    [
        ("dedicated before borrowed on a tie", TURN, [B, A], "a"),
        ("the least loaded", TURN, [replace(A, turns=3), B], "b"),
        ("load is by seats", TURN, [replace(A, turns=3, seats=64), B], "a"),
        ("the holder of the prefix, though it is busier", TurnView(100, "a"), [replace(A, turns=3), B], "a"),
        ("not if the holder is full", TurnView(100, "a"), [replace(A, turns=4), B], "b"),
        ("nor if its memory is", TurnView(901, "a"), [A, replace(B, kv_tokens=2000)], "b"),
        ("an idle worker takes any length", TurnView(5000), [replace(A, turns=0, tokens_held=0), B], "a"),
        ("a closed gate is left alone", TURN, [replace(A, is_open=False), B], "b"),
        ("so is one that just refused", TURN, [replace(A, closed_until_s=NOW_S + 1), B], "b"),
        ("until the time it asked for", TURN, [replace(A, closed_until_s=NOW_S), replace(B, turns=2)], "a"),
    ],
)
def test_who_takes_it(story: str, turn: TurnView, workers: list[WorkerView], worker: str) -> None:
    decision = choose(turn, workers, NOW_S)
    assert isinstance(decision, Place) and decision.worker == worker, story


@pytest.mark.parametrize(
    "workers, words",
    [
        ([], "no worker"),
        ([replace(A, is_open=False)], "takes turns"),
        ([replace(A, turns=4), replace(B, turns=9)], "full"),
    ],
)
def test_when_nobody_can_it_waits_and_says_why(workers: list[WorkerView], words: str) -> None:
    decision = choose(TURN, workers, NOW_S)
    assert isinstance(decision, Wait) and words in decision.reason
