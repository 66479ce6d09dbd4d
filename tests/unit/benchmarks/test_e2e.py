"""What benchmarks/e2e.py and benchmarks/curves.py make of their runs, whole or in pieces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import curves
import e2e
import pieces
from tests.unit.launch_lines import run_lines, summary_of


def test_weights_are_compared_step_by_step():
    assert curves.compared(["a", "b", "c"], ["a", "b", "c"]) == {"equal_steps": 3, "first_difference": None}
    assert curves.compared(["a", "b", "c"], ["a", "x", "c"]) == {"equal_steps": 2, "first_difference": 2}


def test_the_interval_of_three_seeds_by_hand():
    # mean 0.02, standard deviation 0.01, half width 4.303 x 0.01 / sqrt(3) = 0.0248
    assert curves.interval([0.01, 0.02, 0.03]) == (0.02, -0.0048, 0.0448)


def seed_row(setup: str, after: float, **changes: object) -> dict[str, object]:
    row = {"seed": 0, "setup": setup, "steps": 4, "success_after": after, "turns": 100, "lost": 0, "doubled": 0,
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


def test_a_seed_that_lacks_one_of_its_jobs_is_not_compared():
    both = {"equal_steps": 4, "first_difference": None}
    rows = [seed_row("dedicated", 0.5), seed_row("dedicated + borrowed", 0.5, **both),
            seed_row("dedicated", 0.6, seed=1)]  # fmt: skip
    pairs = curves.pairs_of(rows)
    assert pairs == [(rows[0], rows[1])]
    found = curves.overall(pairs)
    assert found["seeds"] == 1 and found["success_difference_low"] is None, "one seed has no interval"
    missed = [bar["what"] for bar in curves.bars(found, is_asynchronous=False) if not bar["ok"]]
    assert "seeds with both jobs" in missed
    assert curves.pairs_of(rows[1:]) == []


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


def test_figures_are_those_of_what_is_shipped_and_say_so():
    def learnt(loss: str, after: float) -> dict[str, object]:
        return heavy(loss, 1.0, None) | {"profile": "default", "case": e2e.LEARN, "success_after": after}

    rows = [learnt("grpo", 0.3), heavy("grpo", 1.2, None), learnt("dapo", 0.7), heavy("dapo", 1.4, None)]
    found = e2e.overall([*rows, restless(10, 0.003)])
    assert (found["throughput_ratio"], found["success_after"]) == (1.4, 0.7)
    assert found["figures_of"] == {
        "compare": "rollout-heavy-compare-dapo-synchronous",
        "learn": "default-learn-dapo-synchronous",
        "cycles": "rollout-heavy-cycles-dapo-synchronous",
    }
    found = e2e.overall(rows[:2])
    assert (found["throughput_ratio"], found["success_after"]) == (1.2, 0.3), "there is nothing else"
    assert set(found["figures_of"].values()) == {
        "rollout-heavy-compare-grpo-synchronous",
        "default-learn-grpo-synchronous",
    }


def names(*words: str) -> list[str]:
    return [job.name for job in e2e.jobs_of(e2e.options().parse_args(words))]


def test_jobs_and_their_steps():
    given = e2e.options().parse_args(["--quick"])
    jobs = e2e.jobs_of(given)
    assert [job.name for job in jobs] == [
        "default-learn-dapo-synchronous",
        "rollout-heavy-compare-dapo-synchronous",
        "rollout-heavy-cycles-dapo-synchronous",
    ]
    assert [e2e.steps_of(job, given) for job in jobs] == [5, 4, 5]
    given = e2e.options().parse_args(["--profile", "rollout-heavy", "--cycles", "0", "--steps", "8"])
    assert [e2e.steps_of(job, given) for job in e2e.jobs_of(given)] == [8] * 4


def test_a_full_measurement_has_both_losses_and_both_loops():
    assert len(set(names())) == len(names()) == 9
    assert names("--profile", "rollout-heavy", "--loss", "grpo", "--asynchronous", "--cycles", "0") == [
        "rollout-heavy-compare-grpo-asynchronous"
    ]


def test_what_is_asked_of_a_run():
    given = e2e.options().parse_args(["--set", "worker.device=cpu:1"])
    by_name = {job.name: e2e.asked_of(job, given) for job in e2e.jobs_of(given)}
    assert "traffic.source=gamma:rate=6.5,cv=2" in by_name["rollout-heavy-compare-grpo-synchronous"]
    assert not any("traffic" in word for word in by_name["default-learn-dapo-synchronous"]), "as it is shipped"
    assert {"groups.dynamic_sampling=false", "compare=true"} <= set(by_name["rollout-heavy-compare-grpo-synchronous"])
    assert "serving.owner_lends_s=12.0" in by_name["rollout-heavy-cycles-dapo-synchronous"]
    assert all(asked[-1] == "worker.device=cpu:1" for asked in by_name.values())


@pytest.mark.parametrize("high, ok", [(1.5, True), (1.3, False)])
def test_dapo_is_held_against_grpo(high, ok):
    [bar] = e2e.bars_of_both([heavy("grpo", 1.4, 1.5), heavy("dapo", 1.2, high)])
    assert bar["ok"] is ok
    other = [heavy("grpo", 9.0, 9.0, "asynchronous"), heavy("dapo", 1.2, high)]
    assert e2e.bars_of_both(other) == [], "of the other loop"
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


def test_the_ideal_is_that_of_synchronous_steps():
    row = heavy("grpo", 1.4, None) | {"rollout_share": 0.8, "idle_share": 0.8}
    found = e2e.with_ideal(row, 0.8)
    assert found["ideal_ratio"] == pytest.approx(1 / (0.2 + 0.8 / 1.64), abs=1e-4)
    assert found["ratio_of_ideal"] == pytest.approx(1.4 / found["ideal_ratio"], abs=1e-4)
    other = e2e.with_ideal(row | {"sync": "asynchronous"}, 0.8)
    assert other["ideal_ratio"] is None and "trainer" in other["ideal_ratio_reason"]


@pytest.mark.parametrize("load, ok", [(0.2, True), (0.06, False), (None, False)])
def test_a_device_that_has_hardly_any_users_shows_little(load, ok):
    row = heavy("grpo", 1.4, None) | {"serving_load": load}
    [bar] = [bar for bar in e2e.bars_of(row) if "busy" in bar["what"]]
    assert bar["ok"] is ok


def test_learning_is_judged_as_it_is_shipped_and_after_all_of_its_steps():
    row = heavy("dapo", 1.0, None) | {"profile": "default", "case": e2e.LEARN, "steps": 20, "success_after": 0.5}
    assert [bar["ok"] for bar in e2e.bars_of(row) if "success" in bar["what"]] == [False]
    for other in ({"steps": 5}, {"loss": "grpo"}, {"sync": "asynchronous"}):
        assert not [bar for bar in e2e.bars_of(row | other) if "success" in bar["what"]]


# In pieces


class Runs:
    """In the place of `rose run`: leaves the summary of a made-up run where it was asked to."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, command: list[str]) -> None:
        settings = dict(word.split("=", 1) for word in command if "=" in word)
        name = command[command.index("--name") + 1]
        self.names.append(name)
        lines = run_lines(int(settings["steps"]), compare=settings.get("compare") == "true")
        folder = Path(settings["runs"]) / name
        folder.mkdir()  # never twice under one name
        lines = [line | {"weights_hash": f"{settings['seed']}-{line.get('step')}"} for line in lines]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (folder / "summary.json").write_text(json.dumps(summary_of(lines, [])))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(pieces, "ran", runs)
    monkeypatch.setattr(e2e, "busy_speed", lambda repeats: 0.8)
    return runs


def call(module: Any, monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, words)])
    code: int = module.main()
    return code


def test_a_measurement_in_pieces_is_that_of_one_call(started, tmp_path, monkeypatch):
    asked = ("--profile", "rollout-heavy", "--sync", "synchronous", "--cycles", "0", "--runs", tmp_path)
    call(e2e, monkeypatch, *asked, "--only", "*-grpo-*")
    (tmp_path / "rollout-heavy-compare-dapo-synchronous").mkdir()  # of a call that was stopped
    call(e2e, monkeypatch, *asked)
    assert started.names == ["rollout-heavy-compare-grpo-synchronous", "rollout-heavy-compare-dapo-synchronous"]
    call(e2e, monkeypatch, *asked, "--collect", "--json", tmp_path / "found.json")
    assert len(started.names) == 2, "nothing is run twice"
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["loss"] for row in found["rows"]] == ["grpo", "dapo"] and found["ideal_ratio"] > 1
    assert set(found["ratios"]) == {"grpo, synchronous", "dapo, synchronous"}
    [bar] = [bar for bar in found["wanted"] if "dapo gains what grpo does" in bar["what"]]
    assert bar["ok"], "the same run twice"


def test_rows_of_another_job_are_refused(started, tmp_path, monkeypatch):
    asked = ("--profile", "rollout-heavy", "--loss", "dapo", "--sync", "synchronous", "--cycles", "0")
    call(e2e, monkeypatch, *asked, "--runs", tmp_path, "--steps", "8")
    with pytest.raises(SystemExit, match=r"steps=8; asked for is steps=4\n  try: another folder"):
        call(e2e, monkeypatch, *asked, "--runs", tmp_path, "--steps", "4")


@pytest.mark.parametrize(
    "words, told",
    [
        (["--only", "rollout-hevy-*"], "there is no job 'rollout-hevy-\\*'"),
        (["--collect"], "nothing to collect from"),
        (["--collect", "--runs", "{place}"], "no job of these is in"),
    ],
)
def test_what_cannot_be_done_is_said(started, tmp_path, monkeypatch, words, told):
    with pytest.raises(SystemExit, match=told):
        call(e2e, monkeypatch, *(word.format(place=tmp_path) for word in words))
    assert started.names == []


def test_a_run_that_fails_ends_the_call_and_leaves_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(e2e, "busy_speed", lambda repeats: 0.8)
    monkeypatch.setattr(e2e.sys, "executable", "false")
    with pytest.raises(SystemExit, match=r"a run ended with 1.*\n  the command was: false -m rose run"):
        call(e2e, monkeypatch, "--quick", "--runs", tmp_path, "--only", "*-cycles-*")
    assert not list(tmp_path.glob("*.json"))


def test_jobs_are_listed(started, monkeypatch, capsys):
    assert call(e2e, monkeypatch, "--list", "--only", "*-cycles-*") == 0
    assert capsys.readouterr().out == "rollout-heavy-cycles-dapo-synchronous\n" and started.names == []
    assert call(curves, monkeypatch, "--list", "--seeds", "2") == 0
    assert capsys.readouterr().out.split() == ["seed-0-dedicated", "seed-0-borrowed", "seed-1-dedicated",
                                               "seed-1-borrowed"]  # fmt: skip


def test_curves_seed_by_seed(started, tmp_path, monkeypatch):
    assert call(curves, monkeypatch, "--runs", tmp_path, "--only", "seed-2-borrowed") == 1, "nothing to compare with"
    for seed in range(3):
        call(curves, monkeypatch, "--runs", tmp_path, "--only", f"seed-{seed}-*")
    assert len(started.names) == 6
    assert call(curves, monkeypatch, "--runs", tmp_path, "--collect", "--json", tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["seeds"] == 3 and found["is_bit_equal"] and len(found["rows"]) == 6


def test_the_ideal_ratio_of_no_and_of_all_rollouts():
    assert e2e.ideal_ratio(0.0, 0.8, 1.0) == 1.0
    assert e2e.ideal_ratio(1.0, 1.0, 1.0) == 2.0
    assert e2e.ideal_ratio(0.7, 0.8, 1.0) == pytest.approx(1 / (0.3 + 0.7 / 1.8))
