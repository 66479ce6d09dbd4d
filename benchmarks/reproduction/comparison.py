"""Ratios within a seed, their 95 % intervals over seeds, and the rows of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from reproduction.competitors import Figures
from reproduction.sharing import Shared

STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # of 95 % on two sides, by the number of seeds
RATIO_MIN = 1.1  # wanted of ours over the paper's rules where rollouts are not bound by one trajectory
BOUND_SHARE = 0.8  # rollouts of which one trajectory alone takes more than this are bound by it
REPRODUCED = 0.15  # relative difference of the paper's rules here to the paper's figure


@dataclass(frozen=True, slots=True)
class SetupRuns:
    """All runs of one set-up, a list over seeds for each competitor and each way of sharing."""

    jobs: dict[str, list[Figures]]
    shared: dict[str, list[Shared]]
    longest_s: list[float]  # of the longest trajectory alone, by seed, as a mean over the steps of GRPO
    bound_s: list[float]  # that no router beats, with the devices as ours lends them


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison with a published figure: a competitor over the paper's rules and over ours."""

    what: str
    published: dict[str, float | None]  # by set-up
    competitor: str
    paper: str
    ours: str
    is_time: bool = False  # rollout seconds instead of throughput

    @property
    def names(self) -> set[str]:
        return {self.competitor, self.paper, self.ours}


CELLS = (
    Cell("ROLL GRPO", {"8b": 1.31, "32b": 1.46}, "ROLL GRPO, fixed pool", "paper's rules 1.0 GRPO", "ours GRPO"),
    Cell("ROLL DAPO", {"8b": 1.42, "32b": 3.31}, "ROLL DAPO, fixed pool", "paper's rules 1.0 DAPO", "ours DAPO"),
    Cell("AReaL, both asynchronous", {"8b": 1.44, "32b": 2.69}, "AReaL, fixed pool", "paper's rules 1.0 asynchronous",
         "ours asynchronous"),
    Cell("AReaL, ROSE on GRPO", {"8b": 1.44, "32b": 2.69}, "AReaL, fixed pool", "paper's rules 1.0 GRPO", "ours GRPO"),
    Cell("RLBoost, rollout time", {"8b": 1.23, "32b": 1.23}, "RLBoost, spot", "paper's rules 1.0 GRPO", "ours GRPO",
         is_time=True),
    Cell("Prism, rollout time", {"8b": 1.474, "32b": 1.355}, "Prism, no admission", "paper's rules 1.0 GRPO",
         "ours GRPO", is_time=True),
    Cell("ServerlessLLM, rollout time", {"8b": 1.313, "32b": 1.21}, "ServerlessLLM, reloads", "paper's rules 1.0 GRPO",
         "ours GRPO", is_time=True),
    Cell("serverless, rollout time", {"8b": None, "32b": None}, "serverless", "paper's rules 1.0 GRPO", "ours GRPO",
         is_time=True),
    Cell("paper's rules at 0.7 GRPO", {"8b": None, "32b": None}, "paper's rules 0.7 GRPO", "paper's rules 1.0 GRPO",
         "ours GRPO"),
)  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the ends of its 95 % interval by Student's t; both ends are the mean for one value."""
    mean = fmean(values)
    half = STUDENT_T[len(values)] * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean, mean - half, mean + half


def cell_row(cell: Cell, setup: str, runs: SetupRuns) -> dict[str, Any]:
    def ratios(over: str) -> list[float]:
        pairs = zip(runs.jobs[cell.competitor], runs.jobs[over], strict=True)
        if cell.is_time:
            return [theirs.rollout_s / mine.rollout_s for theirs, mine in pairs]
        return [mine.trained_per_s / theirs.trained_per_s for theirs, mine in pairs]

    paper, ours = ratios(cell.paper), ratios(cell.ours)
    direct = [mine / theirs for mine, theirs in zip(ours, paper, strict=True)]
    row = {"setup": setup, "against": cell.what, "paper_figure": cell.published.get(setup)}
    row |= _named("paper_rules", paper) | _named("ours", ours) | _named("ours_over_paper_rules", direct)
    row["longest_share"] = None  # batches of an asynchronous job overlap
    if cell.ours != "ours asynchronous":
        row["longest_share"] = round(fmean(runs.longest_s) / fmean(one.rollout_s for one in runs.jobs[cell.ours]), 2)
    if cell.ours == "ours GRPO":
        row["over_bound"] = round(fmean(one.rollout_s for one in runs.jobs[cell.ours]) / fmean(runs.bound_s), 2)
    return row


def is_bound(row: dict[str, Any]) -> bool:
    """Return whether the rollouts of a row are bound by one trajectory."""
    return row["longest_share"] is not None and row["longest_share"] >= BOUND_SHARE


def _named(name: str, values: Sequence[float]) -> dict[str, float]:
    mean, low, high = interval(values)
    return {name: round(mean, 3), f"{name}_low": round(low, 3), f"{name}_high": round(high, 3)}


def sharing_rows(setup: str, runs: SetupRuns) -> list[dict[str, Any]]:
    """Return what users notice of each way of sharing, against serving alone."""
    rows = []
    for way, found in runs.shared.items():
        row: dict[str, Any] = {"setup": setup, "way": way, "requests": sum(one.requests for one in found)}
        measures: dict[str, Callable[[Shared], float]] = {
            "lent_share": lambda one: one.lent_share,
            "ttft_p99_ms": lambda one: 1000 * one.ttft_p99_s,
            "tpot_p99_ms": lambda one: 1000 * one.tpot_p99_s,
            "attainment": lambda one: one.attainment,
        }
        for name, measure in measures.items():
            row |= _named(name, [measure(one) for one in found])
        rows.append(row)
    return rows


def job_rows(setup: str, runs: SetupRuns) -> list[dict[str, Any]]:
    rows = []
    for name, found in runs.jobs.items():
        row: dict[str, Any] = {"setup": setup, "competitor": name}
        for field in Figures.__dataclass_fields__:
            row |= _named(field, [float(getattr(one, field)) for one in found])
        rows.append(row)
    return rows
