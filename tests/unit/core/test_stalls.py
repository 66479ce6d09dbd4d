"""Stalled turns, blocked devices, and pacing of re-routed turns."""

from __future__ import annotations

import pytest

from rose.core.stalls import ObservedStall, Pacer, PacingRules, StallDetector, Stalls
from rose.engines.base import Budget


def seen(*, first_s: float | None = None, later_s: float | None = None, at_s: float = 0.0) -> Stalls:
    stalls = Stalls()
    if first_s is not None:
        stalls.on_progress("w", first_s, at_s, first_of=100)
    if later_s is not None:
        stalls.on_progress("w", later_s, at_s, first_of=None)
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
        stalls.on_progress("w", 0.1, 0.0, first_of=None)
    assert stalls.predicted_s("w", first_of=None) < 0.2


def test_marks_grow_are_bounded_and_removed_by_ended_turns() -> None:
    stalls = Stalls()
    now_s, marked_s = 100.0, []
    for _ in range(8):
        until_s = stalls.mark("w", now_s)
        assert stalls.mark("w", now_s + 0.1) == until_s, "one mark for all turns that stalled at once"
        marked_s.append(until_s - now_s)
        now_s = until_s + 1.0
    assert marked_s == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    for _ in range(8):
        stalls.on_ended("w")
    assert stalls.mark("w", now_s) == now_s + 2.0
    stalls.on_progress("w", 0.1, now_s + 10.0, first_of=None)
    assert stalls.mark("w", now_s + 10.1) <= now_s + 2.0, "a worker that gets on is not marked"
    stalls.forget("w")
    assert stalls.mark("w", now_s + 20.0) == now_s + 22.0


WIDE = Budget(512, 64)
LET, NOT, LEFT, FORGET = "let", "not", "left", "forget"


@pytest.mark.parametrize(
    "told, now_s, shut_s",
    [
        pytest.param([(NOT, 1.0)], 1.1, None, id="for a moment"),
        pytest.param([(NOT, 1.0)], 1.5, 0.5, id="for longer than that"),
        pytest.param([(NOT, 1.0), (NOT, 1.2), (NOT, 9.0)], 9.0, 8.0, id="since it was first asked in vain"),
        pytest.param([(NOT, 1.0), (LET, 2.0)], 9.0, None, id="open with the next step"),
        pytest.param([(NOT, 1.0), (LET, 1.2), (NOT, 1.25)], 1.4, None, id="shut and open and shut: not for long"),
        pytest.param([(NOT, 1.0), (LET, 2.0), (NOT, 2.5)], 3.0, 0.5, id="shut again"),
        pytest.param([(NOT, 1.0), (LEFT, 1.1)], 9.0, None, id="they left at once"),
        pytest.param([(NOT, 1.0), (LEFT, 3.0)], 9.0, 8.0, id="they left because it was shut"),
        pytest.param([(NOT, 1.0), (LEFT, 3.0), (LET, 4.0)], 9.0, None, id="they could come back"),
        pytest.param([(NOT, 1.0), (FORGET, 3.0)], 9.0, None, id="its owner has shut it"),
    ],
)
def test_admission_is_blocked_while_rollouts_get_no_step(
    told: list[tuple[str, float]], now_s: float, shut_s: float | None
) -> None:
    watch = StallDetector()
    for what, at_s in told:
        if what == FORGET:
            watch.forget()
        elif what == LEFT:
            watch.on_idle(at_s)
        else:
            watch.on_request(at_s, is_admitted=what == LET)
    assert watch.blocked_s(now_s) == shut_s


def test_a_new_stall_is_reported_once() -> None:
    watch = StallDetector()
    watch.on_request(0.0, is_admitted=False)
    assert [watch.newly_blocked(now_s) for now_s in (0.1, 0.5, 0.6)] == [False, True, False]
    watch.on_request(1.0, is_admitted=True)
    assert not watch.newly_blocked(1.0)
    watch.on_request(1.1, is_admitted=False)
    assert [watch.newly_blocked(now_s) for now_s in (1.2, 1.4, 1.5)] == [False, True, False]


@pytest.mark.parametrize(
    "told, gated_since_s, opened_s",
    [
        pytest.param([(1.0, None)], None, 0.5, id="never shut"),
        pytest.param([(1.0, 0.3)], 0.7, 0.5, id="shut since a while"),
        pytest.param([(1.0, 0.3), (2.1, 1.3)], 0.7, 0.5, id="still, whatever the way here took"),
        pytest.param([(1.0, 0.3), (2.0, None)], None, 2.0, id="open again"),
        pytest.param([(1.0, 0.3), (2.0, 0.4)], 1.6, 1.6, id="open in between, and nobody said so"),
        pytest.param([(1.0, 0.3), (2.0, None), (3.0, 1.2)], 2.0, 2.0, id="not before it was seen to be open"),
        pytest.param([(1.0, 9.0)], 0.5, 0.5, id="not before it joined"),
    ],
)
def test_a_gateway_derives_the_stall_from_heartbeats(
    told: list[tuple[float, float | None]], gated_since_s: float | None, opened_s: float
) -> None:
    seen = ObservedStall(0.5)
    for now_s, shut_s in told:
        seen.on_heartbeat(shut_s, now_s)
    assert (seen.blocked_since_s, seen.opened_s) == (pytest.approx(gated_since_s), pytest.approx(opened_s))


def test_blocked_time_does_not_count_as_quiet() -> None:
    seen = ObservedStall()
    assert seen.quiet_s(3.0, 10.0) == 7.0
    seen.on_heartbeat(6.0, 10.0)
    assert seen.quiet_s(3.0, 10.0) == 1.0 and seen.quiet_s(5.0, 10.0) == 0.0
    seen.on_heartbeat(None, 12.0)
    assert seen.quiet_s(3.0, 12.5) == 0.5 and seen.quiet_s(12.25, 12.5) == 0.25


def test_a_few_evicted_turns_are_placed_at_once() -> None:
    pacer = Pacer(PacingRules(burst_turns=4))
    pacer.on_evicted(4, 0.0)
    assert all(pacer.may_place(0.0, True) for _ in range(4)) and pacer.next_s() is None


def test_many_evicted_turns_are_paced_and_new_turns_never_wait() -> None:
    pacer = Pacer(PacingRules(burst_turns=2, prompt_share=0.5))
    pacer.set_capacity(workers=3, prompts_per_s=20.0)
    pacer.on_evicted(100, 10.0)
    placed = [0.0] * sum(pacer.may_place(10.0, True) for _ in range(100))
    assert len(placed) <= 6
    assert pacer.may_place(10.0, False)
    now_s = pacer.next_s()
    while now_s is not None:
        assert pacer.may_place(now_s, True)
        placed.append(now_s)
        now_s = pacer.next_s()
    assert len(placed) == 100
    assert placed[-1] == pytest.approx(10.0 + (100 - 6) / 10.0, rel=0.1), "half of 20 prompts a second"


def test_a_clock_that_jumps_back_delays_little() -> None:
    pacer = Pacer(PacingRules(burst_turns=1))
    pacer.on_evicted(10, 1000.0)
    while pacer.may_place(1000.0, True):
        pass
    assert not pacer.may_place(5.0, True)
    assert pacer.may_place(6.1, True)
