"""When a turn has stalled: stories of one worker."""

from __future__ import annotations

import pytest

from rose.core.stalls import Stalls


def seen(*, first_s: float | None = None, later_s: float | None = None, at_s: float = 0.0) -> Stalls:
    stalls = Stalls()
    if first_s is not None:
        stalls.moved("w", first_s, at_s, first_of=100)
    if later_s is not None:
        stalls.moved("w", later_s, at_s, first_of=None)
    return stalls


@pytest.mark.parametrize("story, stalls, first_of, whole_s, quiet_s, is_stalled", [
    ("quick steps get half a second", seen(later_s=0.02), None, 0.0, 0.4, False),
    ("and no more", seen(later_s=0.02), None, 0.0, 0.6, True),
    ("slow ones four times their own", seen(later_s=0.3), None, 0.0, 1.1, False),
    ("and no more", seen(later_s=0.3), None, 0.0, 1.3, True),
    ("a first token waits for the prompt", seen(first_s=0.5, later_s=0.02), 100, 0.0, 1.9, False),
    ("of its own length", seen(first_s=0.5, later_s=0.02), 1000, 0.0, 2.1, False),
    ("and no longer", seen(first_s=0.5, later_s=0.02), 100, 0.0, 2.1, True),
    ("of a stranger the router's word is taken", seen(), 100, 5.0, 19.0, False),
    ("and no more", seen(), 100, 5.0, 21.0, True),
    ("without one, a guess", seen(), 100, 0.0, 9.0, False),
    ("and no more", seen(), 100, 0.0, 11.0, True),
])  # fmt: skip
def test_patience(
    story: str, stalls: Stalls, first_of: int | None, whole_s: float, quiet_s: float, is_stalled: bool
) -> None:
    predicted_s = stalls.predicted_s("w", first_of=first_of, whole_s=whole_s)
    assert stalls.is_stalled("w", quiet_s, predicted_s, now_s=100.0) == is_stalled, story


def test_a_turn_in_a_queue_gets_more_patience_while_others_move() -> None:
    stalls = seen(later_s=0.1, at_s=100.0)
    assert not stalls.is_stalled("w", 1.9, 0.1, now_s=100.2)
    assert stalls.is_stalled("w", 2.1, 0.1, now_s=100.2), "but not for ever"
    assert stalls.is_stalled("w", 0.6, 0.1, now_s=101.0), "nothing moves there"


def test_the_slowest_is_forgotten_in_time() -> None:
    stalls = seen(later_s=10.0)
    for _ in range(300):
        stalls.moved("w", 0.1, 0.0, first_of=None)
    assert stalls.predicted_s("w", first_of=None) < 0.2


def test_marks_grow_are_bounded_and_are_taken_away_by_turns_that_end() -> None:
    stalls = Stalls()
    now_s, marked_s = 100.0, []
    for _ in range(8):
        until_s = stalls.mark("w", now_s)
        assert stalls.mark("w", now_s + 0.1) == until_s, "one mark for all turns that stalled at once"
        marked_s.append(until_s - now_s)
        now_s = until_s + 1.0
    assert marked_s == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    for _ in range(8):
        stalls.ended("w")
    assert stalls.mark("w", now_s) == now_s + 2.0
    stalls.moved("w", 0.1, now_s + 10.0, first_of=None)
    assert stalls.mark("w", now_s + 10.1) <= now_s + 2.0, "a worker that gets on is not marked"
    stalls.forget("w")
    assert stalls.mark("w", now_s + 20.0) == now_s + 22.0
