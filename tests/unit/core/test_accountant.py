"""The accountant, told as stories: when steps were lent and requests had their tokens, and whose fault a miss is."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rose.core.accountant import Breach, SloAccountant
from rose.core.slo import Budgets, Tpot

BUDGETS = Budgets(ttft_s=0.5, tpot_s=0.15)


def new_accountant(slots: int = 64, slowdown: float = 1.0, tpot: Tpot = "mean") -> SloAccountant:
    return SloAccountant(dataclasses.replace(BUDGETS, tpot=tpot), slots=slots, slowdown=lambda: slowdown)


def kind(breach: Breach | None) -> str | None:
    return breach.objective if breach is not None else None


def test_a_step_longer_than_its_estimate_is_a_breach():
    accountant = new_accountant()
    assert accountant.on_lent_step(1.0, 1.01, upper_s=0.02) is None
    breach = accountant.on_lent_step(2.0, 2.06, upper_s=0.02)
    assert breach is not None and breach.objective == "step"
    assert (breach.limit_s, breach.actual_s) == (0.02, pytest.approx(0.06))
    assert accountant.breaches == {"step": 1} and accountant.total_lent_s == pytest.approx(0.07)


@pytest.mark.parametrize(
    "story, lent, first_token_s, slowdown, expected",
    [
        ("in time", [(9.9, 10.1)], 10.5, 2.0, None),
        ("late by what was lent", [(9.9, 10.1)], 10.55, 1.0, "ttft"),
        ("late anyway", [(9.9, 10.1)], 10.7, 1.0, None),
        ("late, unless steps were that much shorter alone", [(9.9, 10.1)], 10.7, 1.3, "ambiguous"),
        ("lent before it came", [(9.0, 10.0)], 10.55, 2.0, None),
        ("two steps while it waited", [(10.0, 10.1), (10.2, 10.3)], 10.69, 1.0, "ttft"),
    ],
)
def test_a_late_first_token_is_a_breach_if_alone_it_were_not(story, lent, first_token_s, slowdown, expected):
    accountant = new_accountant(slowdown=slowdown)
    accountant.on_lent_step(*lent[0], upper_s=math.inf)
    accountant.on_arrival("a", 10.0)
    for step in lent[1:]:
        accountant.on_lent_step(*step, upper_s=math.inf)
    assert kind(accountant.on_first_token("a", first_token_s)) == expected, story
    assert accountant.on_finished("a", 1, first_token_s) is None
    assert accountant.open_accounts == 0
    assert accountant.breaches == ({expected: 1} if expected else {})


@pytest.mark.parametrize("gap_s, expected", [(0.15, None), (0.2, "tpot"), (0.3, "ambiguous"), (0.4, None)])
def test_slow_tokens_are_a_breach_if_alone_they_were_not(gap_s, expected):
    """Of each of five gaps 0.1 s were lent; a life that is longer by a share may have that much more company."""
    accountant = new_accountant()
    accountant.on_arrival("a", 0.0)
    accountant.on_first_token("a", 0.1)
    accountant.on_lent_step(0.1, 0.6, upper_s=math.inf)
    breach = accountant.on_finished("a", 6, 0.1 + 5 * gap_s)
    assert kind(breach) == expected and (breach is None or breach.lent_s == pytest.approx(0.1))


@pytest.mark.parametrize("tpot, expected", [("mean", None), ("every_gap", "tpot")])
def test_one_long_gap_is_a_breach_only_if_every_gap_counts(tpot, expected):
    accountant = new_accountant(tpot=tpot)
    accountant.on_arrival("a", 0.0)
    accountant.on_first_token("a", 0.1)
    accountant.on_token("a", 0.15)
    accountant.on_lent_step(0.15, 0.25, upper_s=math.inf)
    accountant.on_token("a", 0.35)
    assert accountant.is_within_budgets("a", 4, 0.4) is (expected is None)
    accountant.on_token("a", 0.4)
    assert kind(accountant.on_finished("a", 4, 0.4)) == expected


def test_own_times_are_all_but_what_was_lent():
    accountant = new_accountant()
    history = accountant.history
    accountant.on_arrival("a", 0.0)
    accountant.on_lent_step(0.05, 0.09, upper_s=math.inf)
    accountant.on_first_token("a", 0.1)
    accountant.on_lent_step(0.1, 0.6, upper_s=math.inf)
    accountant.on_finished("a", 6, 0.1 + 5 * 0.13)
    assert history.first_tokens.typical == pytest.approx(0.06), "100 ms, of which 40 were lent"
    assert history.gaps.quantile(0.5) == pytest.approx(0.03), "a gap of 130 ms, of which 100 were lent"
    assert history.answers.typical == pytest.approx(0.75 - 0.04 - 0.5), "of its 750 ms"
    accountant.on_arrival("b", 1.0)
    accountant.on_first_token("b", 1.1)
    accountant.on_finished("b", 1, 1.1)
    accountant.on_arrival("c", 1.0)
    accountant.on_cancelled("c", 0, 1.1)
    assert len(history.seen_gaps) == len(history.answers) == 1, "of who has one token or none there is nothing to learn"


def test_a_queue_held_up_by_lending_is_a_breach_for_those_who_join_it():
    accountant = new_accountant()
    accountant.on_arrival("a", 0.0)
    accountant.on_lent_step(0.0, 0.3, upper_s=math.inf)
    accountant.on_arrival("b", 0.3)
    assert accountant.on_first_token("a", 0.6) is not None
    breach = accountant.on_first_token("b", 0.9)
    assert breach is not None and breach.lent_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    "story, slots, slowdown, taken_s, expected",
    [
        ("there was room, and company costs nothing", 64, 1.0, 0.6, None),
        ("company makes steps longer", 64, 1.3, 0.6, "ambiguous"),
        ("slots were short, and company is in them for longer", 1, 1.0, 0.6, "ambiguous"),
        ("late by more than lending held up the company", 1, 1.0, 0.75, None),
    ],
)
def test_company_left_by_earlier_lending_makes_a_miss_ambiguous(story, slots, slowdown, taken_s, expected):
    accountant = new_accountant(slots, slowdown)
    accountant.on_arrival("a", 0.0)
    accountant.on_first_token("a", 0.1)
    accountant.on_lent_step(0.1, 0.3, upper_s=math.inf)
    accountant.on_arrival("b", 0.3)
    assert kind(accountant.on_first_token("b", 0.3 + taken_s)) == expected, story
    assert accountant.breaches["ambiguous"] == (expected is not None)


def test_slow_tokens_are_ambiguous_if_those_beside_them_were_delayed():
    """Nothing was lent between its own tokens, but half of the life of the request beside it was."""
    for lent_s, expected in ((0.0, None), (1.0, "ambiguous")):
        accountant = new_accountant()
        accountant.on_arrival("beside", 0.0)
        accountant.on_first_token("beside", 0.1)
        accountant.on_lent_step(0.1, 0.1 + lent_s, upper_s=math.inf)
        accountant.on_arrival("a", 2.0)
        accountant.on_first_token("a", 2.1)
        assert kind(accountant.on_finished("a", 6, 2.1 + 5 * 0.2)) == expected


def test_a_wait_for_a_slot_that_lending_took_is_not_what_serving_needs_itself():
    accountant = new_accountant(slots=1)
    accountant.on_arrival("a", 0.0)
    accountant.on_first_token("a", 0.1)
    accountant.on_lent_step(0.1, 0.6, upper_s=math.inf)
    accountant.on_arrival("b", 0.6)
    accountant.on_first_token("b", 1.0)
    history = accountant.history
    assert history.first_tokens.largest(2) == (0.1,)
    assert history.seen_first_tokens.largest(2) == pytest.approx((0.1, 0.4)), "it is what users see"


@pytest.mark.parametrize(
    "story, left_s, lent_s, is_breach",
    [
        ("gave up in time", 0.4, 0.4, False),
        ("gave up late, and was kept waiting by lending", 0.6, 0.2, True),
        ("gave up late, as it would have alone", 0.9, 0.2, False),
    ],
)
def test_who_gives_up_waiting_for_a_first_token_has_lost_it(story, left_s, lent_s, is_breach):
    accountant = new_accountant()
    accountant.on_arrival("a", 0.0)
    accountant.on_lent_step(0.0, lent_s, upper_s=math.inf)
    breach = accountant.on_cancelled("a", 0, left_s)
    assert kind(breach) == ("ttft" if is_breach else None), story
    assert accountant.open_accounts == 0 and accountant.on_cancelled("a", 0, 9.0) is None
    accountant.on_arrival("b", 10.0)
    assert accountant.on_first_token("b", 10.6) is None, "nobody has been waiting since"


@pytest.mark.parametrize("left_s, is_breach", [(0.1 + 3 * 0.14, False), (0.1 + 3 * 0.2, True), (0.1 + 3 * 0.4, False)])
def test_who_gives_up_between_tokens_has_lost_the_next_one(left_s, is_breach):
    """Three tokens made and the fourth awaited: three gaps, of which lending took 0.1 s each."""
    accountant = new_accountant()
    accountant.on_arrival("a", 0.0)
    accountant.on_first_token("a", 0.1)
    accountant.on_lent_step(0.1, 0.4, upper_s=math.inf)
    assert (accountant.on_cancelled("a", 3, left_s) is not None) is is_breach
    assert accountant.open_accounts == 0


def test_a_request_that_is_gone_leaves_no_account():
    accountant = new_accountant()
    accountant.on_arrival("a", 0.0)
    accountant.discard("a", 0.1)
    accountant.discard("never came", 0.1)
    assert accountant.open_accounts == 0
    accountant.on_lent_step(0.0, 0.5, upper_s=math.inf)
    accountant.on_arrival("b", 1.0)
    assert accountant.on_first_token("b", 1.7) is None, "nobody was waiting while that was lent"
