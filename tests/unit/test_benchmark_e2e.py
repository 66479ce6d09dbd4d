"""What benchmarks/e2e.py and benchmarks/curves.py make of the lines of a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import curves
import e2e


def test_weights_are_compared_step_by_step():
    assert curves.compared(["a", "b", "c"], ["a", "b", "c"]) == {"equal_steps": 3, "first_difference": None}
    assert curves.compared(["a", "b", "c"], ["a", "x", "c"]) == {"equal_steps": 2, "first_difference": 2}


def test_the_interval_of_three_seeds_by_hand():
    # mean 0.02, standard deviation 0.01, half width 4.303 x 0.01 / sqrt(3) = 0.0248
    assert curves.interval([0.01, 0.02, 0.03]) == (0.02, -0.0048, 0.0448)


def seed_row(setup: str, after: float, **changes: object) -> dict[str, object]:
    row = {"setup": setup, "steps": 4, "success_after": after, "turns": 100, "lost": 0, "doubled": 0,
           "borrowed_turns": 0}  # fmt: skip
    return row | changes


def test_one_step_that_differs_is_enough():
    same = {"equal_steps": 4, "first_difference": None, "borrowed_turns": 50}
    pairs = [(seed_row("dedicated", 0.5), seed_row("borrowed", 0.5, **same)) for _ in range(3)]
    found = curves.overall(pairs)
    assert found["is_bit_equal"] and found["equal_share"] == 1.0 and found["borrowed_share"] == 0.5
    assert all(bar["ok"] for bar in curves.bars(found, is_asynchronous=False))
    pairs[1][1].update(equal_steps=3, first_difference=2)
    found = curves.overall(pairs)
    assert not found["is_bit_equal"] and not curves.bars(found, is_asynchronous=False)[0]["ok"]


def heavy(loss: str, ratio: float, high: float | None, sync: str = "synchronous") -> dict[str, object]:
    row = dict.fromkeys((*e2e.COLUMNS, *e2e.OVERALL))
    known = {"profile": "rollout-heavy", "case": e2e.COMPARE, "loss": loss, "sync": sync, "lost": 0, "doubled": 0}
    return row | known | {"throughput_ratio": ratio, "throughput_ratio_high": high}


def restless(cycles: int, share: float) -> dict[str, object]:
    changes = {"case": e2e.CYCLES, "borrow_cycles": cycles, "allocation_overhead_share": share}
    return heavy("dapo", 1.0, None) | changes


@pytest.mark.parametrize("cycles, share, oks", [(10, 0.004, [True, True]), (9, 0.004, [True, False]),
                                                (12, 0.005, [False, True])])  # fmt: skip
def test_allocation_is_judged_over_enough_cycles_only(cycles, share, oks):
    row = restless(cycles, share)
    bars = [bar for bar in e2e.bars_of(row, 10) if "lost" not in bar["what"] and "twice" not in bar["what"]]
    assert [bar["ok"] for bar in bars] == oks and all("restless owner" in bar["what"] for bar in bars)
    found = e2e.overall([heavy("dapo", 1.4, None) | {"borrow_cycles": 4}, row])
    assert (found["borrow_cycles"], found["allocation_overhead_share"]) == (cycles, share)
    assert found["throughput_ratio"] == 1.4, "which a restless owner has nothing to say to"


def test_jobs_and_their_steps():
    given = e2e.options().parse_args(["--quick"])
    assert e2e.jobs_of(given) == [
        ("default", "learn", "dapo"), ("rollout-heavy", "compare", "dapo"), ("rollout-heavy", "cycles", "dapo"),
    ]  # fmt: skip
    assert [e2e.steps_of(*job[:2], given) for job in e2e.jobs_of(given)] == [10, 4, 4]
    given = e2e.options().parse_args(["--profile", "rollout-heavy", "--cycles", "0", "--steps", "8"])
    assert [e2e.steps_of(*job[:2], given) for job in e2e.jobs_of(given)] == [8]


@pytest.mark.parametrize("high, ok", [(1.5, True), (1.3, False)])
def test_dapo_is_held_against_grpo(high, ok):
    [bar] = e2e.bars_of_both([heavy("grpo", 1.4, 1.5), heavy("dapo", 1.2, high)])
    assert bar["ok"] is ok
    assert e2e.bars_of_both([heavy("dapo", 1.2, high)]) == [], "nothing to compare with"


def test_an_asynchronous_job_has_another_bar():
    [whole] = [bar for bar in e2e.bars_of(heavy("dapo", 1.4, None, "asynchronous")) if "whole steps" in bar["what"]]
    assert whole["bar"] == ">= 1.5" and not whole["ok"]
    [whole] = [bar for bar in e2e.bars_of(heavy("dapo", 1.4, None)) if "whole steps" in bar["what"]]
    assert whole["bar"] == ">= 1.35" and whole["ok"]


def test_what_is_not_measured_says_why():
    found = e2e.overall([heavy("dapo", 1.4, None)])
    assert found["throughput_ratio"] == 1.4 and found["success_after"] is None
    for key in e2e.MEASURED_IN:
        assert found[key] is None and found[f"{key}_reason"]


def test_the_time_to_sync_weights_includes_the_workers():
    lines = [
        {"kind": "step", "step": step, "verdict": verdict, "publish_s": 0.1}
        for step, verdict in ((1, "updated"), (2, "starved"), (3, "updated"))
    ]
    assert e2e.weight_sync_s(lines, {"weight_sync_s": 0.7}) == 0.7, "a synchronous run waits itself"
    lines += [{"kind": "sync", "step": step, "took_s": took_s} for step, took_s in ((1, 0.2), (2, 9.0), (3, 0.4))]
    assert e2e.weight_sync_s(lines, {"weight_sync_s": 0.1}) == pytest.approx(0.4)


def test_the_pause_is_told_by_steps_or_behind_them():
    lines = [{"kind": "step", "pause_s": 0.001}, {"kind": "step", "pause_s": None}, {"kind": "sync", "pause_s": 0.003}]
    assert e2e.pause_s(lines) == pytest.approx(0.002) and e2e.pause_s(lines[1:2]) is None


def test_no_cycle_is_no_figure():
    assert e2e.allocation([{"kind": "step"}]) == {"allocation_overhead_share": None, "borrow_cycles": 0}


def test_only_what_was_given_back_is_a_cycle():
    lines = [
        {"kind": "step", "began_s": 0.0, "step_s": 100.0},
        {"kind": "allocation", "number": 1, "name": "a", "wanted_s": 1.0, "chosen_s": 1.0, "usable_s": 1.5},
        {"kind": "allocation", "number": 1, "name": "a", "wanted_s": 1.0, "chosen_s": 1.0, "usable_s": 1.5,
         "returned_s": 9.0, "released_s": 9.5},
        {"kind": "allocation", "number": 2, "name": "a", "wanted_s": 20.0, "chosen_s": 20.0, "usable_s": 20.0},
    ]  # fmt: skip
    assert e2e.allocation(lines) == {"allocation_overhead_share": pytest.approx(0.01), "borrow_cycles": 1}
