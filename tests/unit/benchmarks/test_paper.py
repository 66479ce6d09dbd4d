"""The benchmark of the paper's table: its set-ups, the competitors on a small one, and the comparison."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from reproduction import competitors, setups, sharing
from reproduction.comparison import CELLS, SetupRuns, cell_row, interval, is_bound
from reproduction.competitors import Figures
from scheduling import traffic

FIGURES = Figures(1.0, 100.0, 10.0, 0.9, 0.01, 1.0, 0)


def test_the_workload_has_the_published_tail() -> None:
    chance = random.Random(0)
    drawn = [one for number in range(150) for one in setups.tail_group(f"{number}", chance)]
    turns = sorted(len(one.turns) for one in drawn)
    longest, usual = turns[-1], turns[len(turns) // 2]
    assert turns[int(0.75 * len(turns))] <= 0.34 * longest and 5 <= longest / usual <= 10
    assert 30_000 < max(one.turns[-1].prompt_tokens + one.turns[-1].output_tokens for one in drawn) <= 32_768


def test_a_part_of_a_setup_keeps_its_proportions() -> None:
    whole = setups.SETUPS[1]
    part = whole.shrunk(4)
    assert (part.dedicated, part.borrowed, part.train_gpus, part.groups) == (1, 4, 8, 16)
    tokens = 1e6
    assert part.costs.training_s(tokens / 4) == pytest.approx(whole.costs.training_s(tokens))
    assert part.costs.sync_s == whole.costs.sync_s


def test_every_cell_names_competitors_that_are_played() -> None:
    names = {competitor.name for competitor in competitors.COMPETITORS}
    for cell in CELLS:
        assert {cell.competitor, cell.paper, cell.ours} <= names
    assert len(names) == len(competitors.COMPETITORS)


def test_every_competitor_of_grpo_plays_a_small_setup() -> None:
    setup = replace(setups.SETUPS[0], dedicated=1, borrowed=1, groups=1)
    trace = traffic.load(None, 0)
    rate = sharing.rate_of(setup, trace)
    shared = {way: sharing.share(setup, way, trace, rate, 1, 35.0, 0) for way in ("alone", *sharing.WAYS)}
    assert shared["alone"].lent_share == 0 < shared["decode"].lent_share
    assert shared["alone"].requests == shared["prism"].requests > 10
    for competitor in competitors.COMPETITORS:
        if competitor.algorithm == "grpo":
            found = competitors.run(competitor, setup, shared, setups.prompts(setup, 0), 1, 0)
            assert found.trained_per_s > 0 and found.rollout_s > 0


def test_ratios_are_taken_within_a_seed() -> None:
    slow = [replace(FIGURES, trained_per_s=rate) for rate in (1.0, 2.0, 4.0)]
    fast = [replace(one, trained_per_s=1.5 * one.trained_per_s) for one in slow]
    jobs = {"ROLL GRPO, fixed pool": slow, "paper's rules 1.0 GRPO": fast, "ours GRPO": fast}
    row = cell_row(CELLS[0], "8b", SetupRuns(jobs, {}, [90.0] * 3, [80.0] * 3))
    assert (row["ours"], row["ours_low"], row["ours_high"]) == (1.5, 1.5, 1.5)
    assert row["ours_over_paper_rules"] == 1.0 and is_bound(row) and row["over_bound"] == 1.25


def test_an_interval_widens_with_the_spread() -> None:
    assert interval([2.0]) == (2.0, 2.0, 2.0)
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and low == pytest.approx(2 - 4.303 / 3**0.5) and high - mean == pytest.approx(mean - low)
