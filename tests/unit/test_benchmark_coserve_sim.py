"""The benchmark of lending in virtual time: every mode meets the same requests, and what is compared with what."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import coserve_sim
from coserve_sim import Case, Place

NOWHERE = Place(None, 0)
TRACE = coserve_sim.TRACES[0]


@pytest.mark.parametrize("load, modes", [("capacity:0.2", coserve_sim.CALM_MODES), ("worst", coserve_sim.WORST_MODES)])
def test_every_mode_meets_the_same_requests(load, modes):
    with ThreadPoolExecutor(1) as pool:
        rows = coserve_sim.rows_of(NOWHERE, Case(TRACE, load, 2, 2.0), pool)  # type: ignore[arg-type]
    assert [row["mode"] for row in rows] == list(modes)
    assert len({row["requests"] for row in rows}) == 1 and rows[0]["requests"] > 5
    alone = [row for row in rows if row["mode"].startswith("alone")]
    assert all(row["lent_share"] == 0 and row["rollout_tok_s"] == 0 for row in alone)
    assert sum(row["points_to_alone"] for row in alone) == pytest.approx(0, abs=0.002)
    assert next(row for row in rows if row["mode"] == "idle")["lending_gain"] == 1.0
    assert all(row["trace"].startswith("generated") for row in rows), "there is no recorded trace here"


def test_calibrated_budgets_are_twice_what_serving_alone_needs():
    with ThreadPoolExecutor(1) as pool:
        case = Case(TRACE, "capacity:0.2", 2, 2.0)
        rows = coserve_sim.rows_of(NOWHERE, case, pool, is_calibrated=True)  # type: ignore[arg-type]
    [first] = [row for row in rows if row["mode"] == "alone_1"]
    for budget, needed in (("budget_ttft_ms", "ttft_p99_ms"), ("budget_tpot_ms", "tpot_p99_ms")):
        assert {row[budget] for row in rows} == {first[budget]}
        assert first[budget] == pytest.approx(2 * first[needed], abs=0.2)
    assert first["attainment"] == 1.0


def test_a_worst_case_comes_at_more_than_the_device_can_do_and_a_calm_one_at_less():
    rates = {}
    for load in ("capacity:0.2", "worst"):
        trace = coserve_sim._requests(NOWHERE, Case(TRACE, load, 2, 30.0), 0)
        rates[load] = len(trace) / 30.0 / coserve_sim._capacity_rps(NOWHERE, TRACE)
    assert rates["capacity:0.2"] == pytest.approx(0.2, rel=0.1) and 0.85 < rates["worst"] < 1.2


@pytest.mark.parametrize(
    "load, points, apart, ok",
    [
        ("worst", -0.4, 0.0, True),
        ("worst", -0.6, 0.0, False),
        ("worst", -0.6, 0.7, True),
        ("capacity:0.2", -0.4, 0.0, False),
        ("capacity:0.2", 0.1, 0.0, True),
    ],
)
def test_serving_may_lose_what_two_runs_of_it_differ_by_and_hardly_more(load, points, apart, ok):
    row = {"mode": "decode", "trace": TRACE, "load": load, "points_to_alone": points, "aa_points": apart}
    assert [bar["ok"] for bar in coserve_sim.bars_of([row, row | {"mode": "paper"}])] == [ok]
