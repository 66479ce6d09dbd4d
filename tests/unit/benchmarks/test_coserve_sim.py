"""The benchmark in virtual time: pairing, intervals, the clairvoyant bound, and that a missing trace is an error."""

from __future__ import annotations

import gzip
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import coserve_sim
from coserve_sim import Case, Run

from rose.core.facts import StepFeatures
from rose.core.slo import Budgets
from rose.sim.simulated_device import DEFAULT_BUDGETS, DeviceReport

BUDGETS = Budgets(0.5, 0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace in a folder that is neither the first nor the last by name."""
    chance, place = random.Random(4), tmp_path / "traces" / "resampled"
    place.mkdir(parents=True)
    (tmp_path / "traces" / "recorded").mkdir()
    at_s, lines = 0.0, ["arrival_s,prompt_tokens,output_tokens"]
    for _ in range(400):
        at_s += chance.expovariate(5)
        lines.append(f"{at_s:.3f},{chance.randint(10, 900)},{chance.randint(1, 60)}")
    (place / "small.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


def test_a_trace_is_found_in_any_folder_and_missing_ones_are_an_error(folder):
    assert coserve_sim.find_trace(folder, "small").parent.name == "resampled"
    with pytest.raises(SystemExit, match="there is no trace other"):
        coserve_sim.find_trace(folder, "other")


@pytest.mark.parametrize("load", ["0.2", "edge"])
def test_every_mode_meets_the_same_requests(folder, load, monkeypatch):
    monkeypatch.setattr(coserve_sim, "MULTIPLES", {"gpu": (2.0,)})
    case = Case(folder, "gpu", "small", load, pieces=1, span_s=4.0, warm_s=1.0)
    with ThreadPoolExecutor(1) as pool:
        rows = coserve_sim.rows_of(case, pool)  # type: ignore[arg-type]
    assert {row["budget"] for row in rows} == {"given", "given_60s", "2x"}
    assert {row["mode"] for row in rows} == {"decode", "idle", "paper", "paper_0.7"}
    assert len({row["requests"] for row in rows}) == 1 and rows[0]["requests"] > 10
    for row in rows:
        assert 0 <= row["lent_share"] <= 1
        assert row["points_low"] <= row["points"] <= row["points_high"]
        assert row["oracle_share"] == 0 or 0 <= row["of_bound"] < 1.2


def run(times: dict[str, tuple[float, float, float]]) -> Run:
    return Run(times, 0, 10.0, 0.0, 0, 1.0, 0, 0)


def test_differences_are_paired_by_request():
    alone = run({"a": (0.0, 0.1, 0.05), "b": (1.0, 0.6, 0.05), "c": (6.0, 0.1, 0.05), "d": (7.0, 0.1, 0.05)})
    lent = run({"a": (0.0, 0.7, 0.05), "b": (1.0, 0.4, 0.05), "c": (6.0, 0.1, 0.2)})
    found = coserve_sim.paired([alone], [lent], BUDGETS)
    assert (found["requests"], found["alone"], found["lost"]) == (4, 75.0, 3)
    assert found["points"] == -50.0
    assert found["points_low"] < found["points"] < found["points_high"]


def test_equal_runs_differ_by_nothing():
    alone = run({str(number): (float(number), 0.1, 0.05) for number in range(50)})
    found = coserve_sim.paired([alone], [alone], BUDGETS)
    assert (found["points"], found["points_low"], found["points_high"], found["lost"]) == (0, 0, 0, 0)


def test_no_schedule_is_shorter_than_the_bound():
    """A thousand decoded tokens in full batches, and their prompts: fewer steps are not possible."""
    report = DeviceReport(
        window_work=StepFeatures(new_tokens=5000, kv_read_tokens=10_000, new_by_context=9000, sequences=640)
    )
    least_s = coserve_sim.least_serving_s("h800-qwen2.5-7b", report)
    assert 10 * 0.0071 < least_s < 0.3


def test_rollouts_alone_are_faster_than_any_harvest():
    assert coserve_sim.rollouts_alone_tok_s("gpu") > 1000


def test_bars_name_the_cell_that_loses():
    row = {
        "profile": "gpu", "trace": "t", "load": "0.2", "budget": "given", "mode": "decode", "requests": 1000,
        "points": -0.05, "points_low": -0.2, "uncounted": 0, "of_bound": 0.95, "lent_share": 0.7,
    }  # fmt: skip
    assert all(bar["ok"] for bar in coserve_sim.matrix_bars([row]))
    bars = coserve_sim.matrix_bars([row, row | {"load": "0.5", "points": -2.0, "points_low": -3.0, "of_bound": 0.5}])
    missed = [bar["what"] for bar in bars if not bar["ok"]]
    assert any("t at 0.5, given" in what for what in missed) and any("mean difference" in what for what in missed)
    assert any("t at 0.5: harvest" in what for what in missed)


def test_budgets_are_multiples_of_serving_alone():
    alone = run({str(number): (0.0, 0.001 * number, 0.0001 * number) for number in range(101)})
    found = coserve_sim.budgets_of("gpu", [alone])
    assert found["given_60s"] == DEFAULT_BUDGETS and set(found) == {"given", "given_60s", "1.27x", "2x", "4x", "8x"}
    assert found["given"] == replace(DEFAULT_BUDGETS, answer_s=600.0)
    assert found["4x"].ttft_s == pytest.approx(0.396) and found["4x"].tpot_s == pytest.approx(0.0396)
