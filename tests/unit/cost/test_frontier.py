"""The next dollar, slack for bursts, slower answers, the worst case; docs/economics.md by its formulas."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rose.cost.frontier import (
    TAIL_SHARE,
    FrontierTerms,
    LossCount,
    RolloutPrices,
    cost_per_correct,
    frontier,
    is_burst,
    slack_of,
    waiting_usd,
    worst_case,
)

PAGE = Path(__file__).parents[3] / "docs" / "economics.md"
PRICES = RolloutPrices(
    4.0, 3.0, 0.2, dedicated_tokens=400.0, serving_tokens=100.0, borrowed_tokens=500.0
)  # the example of the page
TERMS = FrontierTerms(
    answers=500_000, rollouts=400_000, answer_usd=0.008, rollout_million_tokens=0.0025, training_usd=0.002,
    accept_ratio=0.5, prices=PRICES, accept_gain=0.3,
)  # fmt: skip


def test_with_one_price_and_one_length_the_cost_is_cpm_x_r_x_one_plus_rho_over_alpha() -> None:
    cpm_usd, reasoning, alpha = 3.0, 0.004, 0.4
    terms = replace(
        TERMS, answer_usd=cpm_usd * reasoning, rollout_million_tokens=reasoning, training_usd=0.0, accept_ratio=alpha
    )
    rho = terms.rollout_ratio
    assert cost_per_correct(terms, cpm_usd) == pytest.approx(cpm_usd * reasoning * (1 + rho) / alpha)


def test_the_blend_lies_between_the_prices_and_follows_the_tokens() -> None:
    assert PRICES.blend_usd == pytest.approx((4.0 * 400 + 3.0 * 100 + 0.2 * 500) / 1000)
    assert replace(PRICES, dedicated_tokens=0.0, serving_tokens=0.0).blend_usd == pytest.approx(0.2)
    assert RolloutPrices(None, None, None).blend_usd is None
    assert RolloutPrices(4.0, None, None, dedicated_tokens=1.0, borrowed_tokens=9.0).blend_usd == pytest.approx(4.0)


def test_at_the_threshold_a_dollar_buys_as_many_correct_answers_either_way() -> None:
    line = frontier(TERMS).line("blend")
    assert line is not None
    by_inference = TERMS.accept_ratio / TERMS.answer_usd
    by_training = line.gain_needed / line.rollout_usd  # answers x d(alpha)/d(rollouts) = d(alpha)/d(rho)
    assert by_training == pytest.approx(by_inference)


def test_the_dearer_the_line_the_more_a_rollout_must_teach() -> None:
    lines = frontier(TERMS).lines
    assert [line.name for line in lines] == ["dedicated", "serving", "borrowed", "blend"]
    assert lines[0].gain_needed > lines[1].gain_needed > lines[3].gain_needed > lines[2].gain_needed
    assert lines[0].cost_per_correct > lines[3].cost_per_correct > lines[2].cost_per_correct


def test_the_verdict_flips_at_the_break_even_price() -> None:
    usd = frontier(TERMS).break_even_token_usd
    assert usd is not None

    def verdict(price: float) -> str:
        line = frontier(replace(TERMS, prices=RolloutPrices(price, None, None, dedicated_tokens=1.0))).line("dedicated")
        assert line is not None
        return line.next_dollar

    assert (verdict(usd * 0.99), verdict(usd), verdict(usd * 1.01)) == ("training", "either", "inference")


def test_without_a_measured_gain_there_is_a_threshold_and_no_verdict() -> None:
    found = frontier(replace(TERMS, accept_gain=None))
    assert {line.next_dollar for line in found.lines} == {"unknown"} and found.break_even_token_usd is None


@pytest.mark.parametrize("change", [{"answers": 0.0}, {"answer_usd": 0.0}, {"accept_ratio": 0.0}])
def test_without_answers_there_is_no_threshold(change: dict[str, float]) -> None:
    assert frontier(replace(TERMS, **change)).lines == ()


def test_a_burst_is_judged_by_the_minutes_of_its_hour() -> None:
    assert is_burst(20, 10.0) and not is_burst(19, 10.0)
    assert not is_burst(2, 0.1)  # two requests are no burst


def test_the_odds_of_a_burst_depend_on_this_minute_and_on_the_hour() -> None:
    bursty, calm = [[5, 5, 5, 40, 40, 40, 5, 5] * 5], [[5] * 40]
    hours = slack_of({9: bursty, 3: calm}, LossCount(10, 400, 4.0), LossCount(70, 350, 0.0), 0.01)
    assert [hour.hour for hour in hours] == [3, 9]
    quiet, busy = hours
    assert busy.burst_after_burst > busy.burst_after_calm > quiet.burst_after_calm > 0
    assert busy.lent_hour_usd > quiet.lent_hour_usd > 0


def test_the_price_of_an_hour_is_its_odds_times_the_loss() -> None:
    runs = [[5, 5, 40, 5]]
    burst, calm = LossCount(1, 40, 4.0), LossCount(3, 15, 0.0)
    [hour] = slack_of({0: runs}, burst, calm, 0.01)
    after_calm, after_burst = hour.burst_after_calm, hour.burst_after_burst
    day_calm, day_burst = (1 + 0.5) / (2 + 1), (0 + 0.5) / (1 + 1)
    assert after_calm == pytest.approx((1 + day_calm) / 3) and after_burst == pytest.approx(day_burst / 2)
    in_time = after_calm / (after_calm + 1 - after_burst)
    losses = in_time * burst.per_minute + (1 - in_time) * calm.per_minute
    assert hour.lent_hour_usd == pytest.approx(60 * losses * 0.01)


def test_no_loss_among_many_requests_counts_as_half_a_loss() -> None:
    assert LossCount(10, 999, 0.0).per_minute == pytest.approx(0.5 / 1000 * 99.9)
    assert LossCount(10, 999, -7.0).per_minute == LossCount(10, 999, 0.0).per_minute
    assert LossCount(10, 999, 5000.0).per_minute == pytest.approx(99.9)
    assert LossCount(0, 0, 0.0).per_minute == 0.0


def test_hours_without_a_minute_have_the_odds_of_the_day() -> None:
    empty, known = slack_of({1: [], 2: [[5, 5, 40, 40, 5]]}, LossCount(1, 40, 1.0), LossCount(1, 5, 0.0), 1.0)
    assert empty.burst_after_calm == pytest.approx((1 + 0.5) / (2 + 1)) and known.hour == 2


def test_waiting_less_is_free() -> None:
    assert waiting_usd(7200.0, 1.5) == pytest.approx(3.0)
    assert waiting_usd(-7200.0, 1.5) == 0.0


def test_the_shortfall_is_the_mean_of_the_worst_minutes_on_all_devices() -> None:
    losses = [0.0] * 95 + [1.0, 2.0, 3.0, 4.0, 5.0]
    found = worst_case(losses, devices=16, demand_share=0.5, breach_usd=0.01)
    assert (found.minutes, found.tail_minutes) == (100, math.ceil(100 * TAIL_SHARE))
    assert found.shortfall_requests == pytest.approx(16 * 3.0) and found.shortfall_usd == pytest.approx(0.48)
    assert found.mean_usd == pytest.approx(16 * 0.5 * 15 / 100 * 0.01)


def test_a_minute_that_lending_helped_pays_for_no_other() -> None:
    assert worst_case([-50.0, 1.0], 1, 1.0, 1.0, tail_share=1.0).shortfall_requests == pytest.approx(0.5)
    assert worst_case([], 4, 1.0, 1.0).shortfall_usd == 0.0


# The page


def rows(heading: str) -> dict[str, list[float]]:
    """Return the numbers of the table below a heading, by the first cell."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {
        cells[0].strip().strip("`"): [
            float(number) for cell in cells[1:] for number in re.findall(r"-?[\d.]+", cell.replace(",", ""))
        ]
        for cells in table[2:]
    }


def test_the_worked_example_of_the_page_is_what_the_functions_return() -> None:
    given = {name: numbers[0] for name, numbers in rows("Example: the terms").items()}
    prices = RolloutPrices(
        given["dedicated price"], given["serving price"], given["borrowed price"], given["dedicated tokens"],
        given["serving tokens"], given["borrowed tokens"],
    )  # fmt: skip
    terms = FrontierTerms(
        given["answers"], given["rollouts"], given["answer_usd"], given["rollout_million_tokens"],
        given["training_usd"], given["alpha"], prices, given["gain"],
    )  # fmt: skip
    assert terms == TERMS
    found, shown = frontier(terms), rows("Example: the lines")
    assert shown.keys() == {line.name for line in found.lines}
    for line in found.lines:
        values = [line.token_usd, line.rollout_usd, line.cost_per_correct, line.gain_needed]
        assert shown[line.name] == pytest.approx(values, rel=1e-9), line.name
        assert f"| {line.next_dollar} |" in next(
            text for text in PAGE.read_text().splitlines() if text.startswith(f"| {line.name} |")
        )
    assert found.break_even_token_usd == pytest.approx(rows("Example: the break-even price")["break-even"][0])


def test_the_risks_of_the_page_are_what_the_functions_return() -> None:
    shown = {name: numbers[0] for name, numbers in rows("Example: the risks").items()}
    runs = [[10, 10, 10, 50, 50, 10, 10, 10, 10, 10]]
    [hour] = slack_of({9: runs}, LossCount(2, 100, 1.0), LossCount(8, 80, 0.0), 0.01)
    assert shown["a burst after a calm minute"] == pytest.approx(hour.burst_after_calm, abs=5e-5)
    assert shown["a burst after a burst"] == pytest.approx(hour.burst_after_burst, abs=5e-5)
    assert shown["a lent hour of this device"] == pytest.approx(hour.lent_hour_usd, abs=5e-5)
    assert shown["slower answers"] == pytest.approx(waiting_usd(0.025 * 600, 1.0), abs=5e-6)
    worst = worst_case([0.0] * 38 + [2.0, 4.0], 16, 0.5, 0.01)
    assert shown["an average minute"] == pytest.approx(worst.mean_usd, abs=5e-5)
    assert shown["a shortfall minute"] == pytest.approx(worst.shortfall_usd, abs=5e-5)
