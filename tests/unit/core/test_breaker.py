"""The circuit breaker: what stops lending by itself, for how long, and what is forgotten then."""

from __future__ import annotations

import pytest

from rose.core.breaker import Breaker, BreakerLimits


def test_the_breaker_trips_by_lost_deadlines_and_cools_down():
    breaker = Breaker()
    for _ in range(breaker.limits.deadlines_lost_max):
        breaker.on_deadline_lost(1.0)
    assert breaker.why_stopped(1.0) is None
    breaker.on_deadline_lost(2.0)
    assert "4 deadlines lost" in (breaker.why_stopped(2.0) or "")
    assert breaker.why_stopped(21.9) is not None
    assert breaker.why_stopped(22.0) is None
    assert breaker.trips == 1


def test_what_is_older_than_a_minute_does_not_count():
    breaker = Breaker()
    for now_s in (1.0, 2.0, 3.0, 70.0):
        breaker.on_deadline_lost(now_s)
    assert breaker.why_stopped(70.0) is None


def test_the_cool_down_doubles_while_it_keeps_tripping_and_the_owner_ends_it():
    breaker = Breaker(BreakerLimits(deadlines_lost_max=0))
    breaker.on_deadline_lost(0.0)
    assert breaker.why_stopped(0.0)
    breaker.on_deadline_lost(20.0)
    assert breaker.why_stopped(20.0) is None, "a clean slate after a cool-down"
    breaker.on_deadline_lost(21.0)
    assert breaker.why_stopped(21.0) and breaker.why_stopped(21.0 + 39.0)
    breaker.resume()
    assert breaker.why_stopped(21.0 + 39.0) is None


def test_late_steps_alone_are_forgiven_in_seconds():
    """A machine that was busy when lending began: ten late steps, then none. It cost a whole minute once."""
    breaker = Breaker()
    for number in range(10):
        breaker.on_lent_step(1.0 + number / 1000, is_late=True)
    assert "10 of 10 lent steps" in (breaker.why_stopped(2.0) or "")
    assert breaker.why_stopped(6.9) is not None
    assert breaker.why_stopped(7.0) is None
    for number in range(10):
        breaker.on_lent_step(8.0 + number / 1000, is_late=True)
    assert breaker.why_stopped(9.0) and breaker.why_stopped(18.9), "twice as long, if it goes on"
    assert breaker.why_stopped(19.0) is None


def late_steps(breaker: Breaker, at_s: float) -> None:
    for number in range(10):
        breaker.on_lent_step(at_s + number / 1000, is_late=True)
    assert "lent steps" in (breaker.why_stopped(at_s + 0.1) or "")


def lost_deadlines(breaker: Breaker, at_s: float) -> None:
    for _ in range(4):
        breaker.on_deadline_lost(at_s)
    assert "deadlines" in (breaker.why_stopped(at_s) or "")


def test_late_steps_do_not_lengthen_the_rest_for_lost_deadlines():
    """Each cause has its own cool-down. They shared one: an hour of late steps, and one bad minute cost sixteen."""
    breaker, at_s = Breaker(), 0.0
    for rest_s in (5.0, 10.0, 20.0, 40.0):
        late_steps(breaker, at_s)
        assert breaker.why_stopped(at_s + rest_s)
        at_s += rest_s + 0.2
        assert breaker.why_stopped(at_s) is None
    lost_deadlines(breaker, at_s)
    assert breaker.why_stopped(at_s + 19.9) and breaker.why_stopped(at_s + 20.0) is None
    assert breaker.trips == 5


def test_deadlines_that_late_steps_cost_take_over_their_rest():
    """They show when requests end, which is after the steps: once they were forgotten with them, after five seconds."""
    breaker = Breaker()
    for number in range(50):
        breaker.on_lent_step(1.0 + number / 1000, is_late=number < 10)
    assert "lent steps" in (breaker.why_stopped(1.1) or "")
    for number in range(6):
        breaker.on_deadline_lost(3.0 + number / 10)
    assert "6 deadlines" in (breaker.why_stopped(4.0) or "")
    assert breaker.why_stopped(23.9) and breaker.why_stopped(24.0) is None
    assert breaker.trips == 2


def test_a_rest_for_late_steps_forgives_nothing_else():
    breaker = Breaker()
    late_steps(breaker, 1.0)
    for _ in range(2):
        breaker.on_deadline_lost(3.0)
    assert breaker.why_stopped(6.1) is None
    for number in range(9):
        breaker.on_lent_step(6.2 + number / 1000, is_late=True)
    assert breaker.why_stopped(6.3) is None, "late steps are"
    for _ in range(2):
        breaker.on_deadline_lost(7.0)
    assert "4 deadlines" in (breaker.why_stopped(7.0) or "")


def test_lost_deadlines_do_not_shorten_a_rest():
    breaker = Breaker(BreakerLimits(late_cool_down_s=100.0))
    late_steps(breaker, 0.0)
    lost_deadlines(breaker, 1.0)
    assert breaker.why_stopped(100.0) and breaker.why_stopped(100.2) is None
    late_steps(breaker, 101.0)
    breaker.resume()
    lost_deadlines(breaker, 102.0)
    assert breaker.why_stopped(122.0) is None, "the owner has ended the one before"


def test_a_minute_in_peace_forgives_each_cause():
    breaker = Breaker()
    lost_deadlines(breaker, 0.0)
    assert breaker.why_stopped(20.0) is None
    lost_deadlines(breaker, 21.0)
    assert breaker.why_stopped(21.0 + 39.9) and breaker.why_stopped(21.0 + 40.0) is None, "it went on"
    lost_deadlines(breaker, 131.0)
    assert breaker.why_stopped(131.0 + 19.9) and breaker.why_stopped(131.0 + 20.0) is None


@pytest.mark.parametrize(
    "story, lent, late, requests, lost, is_stopped",
    [
        ("1 late step in 100 is what was promised", 1000, 10, 0, 0, False),
        ("few steps prove nothing", 9, 9, 0, 0, False),
        ("a fifth of steps late", 100, 20, 0, 0, True),
        ("nothing lost", 0, 0, 1000, 0, False),
        ("one in a hundred lost", 0, 0, 1000, 10, False),
        ("more than that", 0, 0, 1000, 11, True),
        ("three of a few prove nothing", 0, 0, 10, 3, False),
        ("four do", 0, 0, 10, 4, True),
    ],
)
def test_the_breaker_by_shares(story, lent, late, requests, lost, is_stopped):
    breaker = Breaker()
    for number in range(lent):
        breaker.on_lent_step(1.0 + number / 1000, is_late=number < late)
    for number in range(requests):
        breaker.on_finished(1.0 + number / 1000)
    for _ in range(lost):
        breaker.on_deadline_lost(2.0)
    assert (breaker.why_stopped(3.0) is not None) is is_stopped, story
    assert breaker.why_stopped(3.0 + 130.0) is None, "a minute later it is forgotten, or has cooled down"
