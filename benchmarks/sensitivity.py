"""How much the figures of lending depend on the numbers that were set by hand: each halved, doubled, and taken out.

    python benchmarks/sensitivity.py --data FOLDER --json FILE      FOLDER/traces and FOLDER/trajectories; or ROSE_DATA

Three tables in virtual time, on recordings that no number was chosen on: TauBench's airline agents for the router's
weights and the length model, Azure's code completions for the admission's constants. `router` and `lengths` rows are
completion times over those of the numbers as they are, of the same drawn trajectories; `admission` rows are the change
of the lent share, and of the requests in budget, in points, for the same requests. A row has the median over seeds and
the lowest and highest of them. `off` takes the number's effect out, as `off_is` says. A number that is capped at a
share of 1 is not doubled beyond it. Without the recordings generated ones stand in, and the rows say so.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import harness
from schedule import SETUPS, Setup
from scheduling import traffic, trajectories

from rose.core import bursts, history, lengths
from rose.core.admission import LendingLimits
from rose.core.lengths import Lengths
from rose.core.memory import MemoryLimits, MemoryPolicy
from rose.core.router import Router
from rose.core.routing_rules import RoutingCosts
from rose.engines.profiles import load_profile
from rose.sim import lent_timeline
from rose.sim.batch_cluster import BatchCluster, PlannedTrajectory
from rose.sim.lent_timeline import LentTimeline, SaturatedDevice, saturated_requests_per_s

TRAJECTORIES, TRAFFIC = "taubench_airline_gpt4o", "azure2023_code"
GROUP, LIKENESS = 16, 0.5
SHRUNK_BY = 4  # 2 dedicated and 4 borrowed workers: as many trajectories per worker as at full size
LENT_LOAD = 0.2  # of serving's capacity, on the devices that the router uses
LOADS = (0.2, 0.3)  # for the admission; serving alone keeps nearly all budgets at the first, and not at the second
TABLES = ("router", "lengths", "admission")
FRESH = 7919  # seeds that nothing was chosen on begin here
HALF, DOUBLE, OFF = "x0.5", "x2", "off"
Change = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How many seeds, how many groups of trajectories a batch has, and how long devices are simulated."""

    seeds: int = 3
    groups: int = 16
    span_s: float = 120.0


QUICK = Size(seeds=2, groups=4, span_s=40.0)


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that was set by hand. `change` makes it another one for as long as it lasts."""

    name: str
    value: float
    off: float
    off_is: str
    change: Callable[[float], Change]
    most: float = math.inf

    def variants(self) -> Iterator[tuple[str, float]]:
        yield HALF, self.value / 2
        if self.value < self.most:
            yield DOUBLE, min(self.most, 2 * self.value)
        yield OFF, self.off


def constant(module: ModuleType, name: str, off: float, off_is: str, most: float = math.inf) -> Knob:
    value = getattr(module, name)
    kind = type(value)

    def change(to: float) -> Change:
        return mock.patch.object(module, name, to if math.isinf(to) else kind(to))

    return Knob(name, value, off, off_is, change, most)


# The router and the length model: how soon a batch ends


def routing(name: str, off: float, off_is: str, most: float = math.inf) -> Knob:
    def change(to: float) -> Change:
        changed = partial(Router, settings=replace(RoutingCosts(), **{name: to}))
        return mock.patch.dict(globals(), {"Router": changed})

    return Knob(name, getattr(RoutingCosts(), name), off, off_is, change, most)


def scaled_prediction() -> Knob:
    original = Lengths.remaining

    def change(to: float) -> Change:
        def remaining(self: Lengths, group: str | None, done_tokens: int) -> float | None:
            found = original(self, group, done_tokens)
            return None if found is None or not to else found * to

        return mock.patch.object(Lengths, "remaining", remaining)

    return Knob("predicted remaining length", 1.0, 0.0, "no prediction", change)


def scaled_likeness() -> Knob:
    original = Lengths.likeness.fget
    assert original is not None

    def change(to: float) -> Change:
        return mock.patch.object(Lengths, "likeness", property(lambda self: min(0.99, to * original(self))))

    return Knob("likeness within groups", 1.0, 0.0, "groups are unrelated", change)


ROUTER_KNOBS = (
    routing("crowding", 0.0, "a full worker slows nothing"),
    routing("interference", 0.0, "prompts slow no decode"),
    routing("foresight", 0.0, "later turns do not count"),
    routing("promise_share", 1e9, "no memory is promised"),
    routing("empty_s", 0.0, "an empty worker takes any turn"),
    routing("urgency_min", 1.0, "short trajectories weigh as usual ones", most=1.0),
    routing("urgency_max", 1.0, "long trajectories weigh as usual ones"),
)
LENGTH_KNOBS = (
    scaled_prediction(),
    scaled_likeness(),
    constant(lengths, "FINISHED_MIN", math.inf, "no trajectory is predicted"),
    constant(lengths, "ANSWERS_MIN", math.inf, "`max_tokens` is assumed"),
    constant(lengths, "ANSWER_QUANTILE", 0.0, "the shortest answer is assumed", most=1.0),
    constant(lengths, "VARIANCE_MIN", 0.0001, "as good as none"),
)


def completion_s(setup: Setup, lines: list[LentTimeline], drawn: Sequence[PlannedTrajectory]) -> float:
    return float(BatchCluster(Router("cost"), setup.profile, setup.dedicated, lines, drawn).run().completion_s)


def batch_rows(
    table: str, knobs: Sequence[Knob], size: Size, seeds: Sequence[int], folder: Path | None
) -> list[dict[str, Any]]:
    setup = SETUPS[0].shrunk(SHRUNK_BY)
    source = trajectories.load(TRAJECTORIES, folder, FRESH)
    requests = traffic.load(folder, FRESH)
    worlds = []
    for seed in seeds:
        lines = [
            device_of(setup, requests, LENT_LOAD, seed + 100 * number, size.span_s, lends=True).run()
            for number in range(setup.borrowed)
        ]
        drawn = trajectories.draw(source, size.groups, GROUP, LIKENESS, seed)
        worlds.append((lines, drawn, completion_s(setup, lines, drawn)))
    rows = []
    for knob in knobs:
        for variant, to in knob.variants():
            with knob.change(to):
                ratios = [completion_s(setup, lines, drawn) / base_s for lines, drawn, base_s in worlds]
            row = row_of(table, knob, variant, to) | {"data": source.what}
            harness.put_ratio(row, "completion", ratios)
            rows.append(row)
    return rows


# The admission: what is lent, and what users lose


def limits(name: str, off: float, off_is: str, most: float = math.inf) -> Knob:
    def change(to: float) -> Change:
        return mock.patch.object(lent_timeline, "LendingLimits", partial(LendingLimits, **{name: to}))

    return Knob(name, getattr(LendingLimits(), name), off, off_is, change, most)


def slack_share() -> Knob:
    def change(to: float) -> Change:
        changed = tuple(replace(one, budgets=replace(one.budgets, slack_share=to)) for one in SETUPS)
        return mock.patch.dict(globals(), {"SETUPS": changed})

    return Knob("slack_share", SETUPS[0].budgets.slack_share, 1.0, "the whole budgets", change, most=1.0)


def headroom() -> Knob:
    def change(to: float) -> Change:
        changed = lambda pages: MemoryPolicy(pages, MemoryLimits(headroom_share=to))  # noqa: E731
        return mock.patch.object(lent_timeline, "MemoryPolicy", changed)

    return Knob("headroom_share", MemoryLimits().headroom_share, 0.01, "one page in a hundred is kept", change)


ADMISSION_KNOBS = (
    slack_share(),
    limits("block_share", 1.0, "a step may take the whole TTFT budget", most=1.0),
    limits("efficiency_min", 0.001, "any small step will do", most=1.0),
    limits("prefill_share_max", 1.0, "prompts may take all the time", most=1.0),
    limits("latch_s", 0.0, "it does not hold"),
    limits("switch_s", 0.0, "changing sides is free"),
    constant(history, "WAIT_SHARE", 0.0, "no wait for a slot is allowed", most=1.0),
    constant(bursts, "BEYOND_SHARE", 0.99, "hardly any room is kept for bursts", most=0.99),
    constant(bursts, "UNKNOWN_S", 0.01, "nothing is reserved at first"),
    headroom(),
)


def device_of(
    setup: Setup, trace: traffic.Trace, load: float, seed: int, span_s: float, *, lends: bool
) -> SaturatedDevice:
    serving = load_profile(setup.serving)
    most = saturated_requests_per_s(serving, setup.budgets, list(trace.requests[:600])) / trace.requests_per_s
    arrivals = trace.piece(seed * 97.0 % trace.span_s, span_s, load * most)
    return SaturatedDevice(serving, setup.profile, setup.budgets, arrivals, span_s, seed, lends=lends)


def lent_and_kept(
    trace: traffic.Trace, load: float, seed: int, span_s: float, *, lends: bool = True
) -> tuple[float, float]:
    """Return the lent share and the share of requests in budget."""
    line = device_of(SETUPS[0], trace, load, seed, span_s, lends=lends).run()
    return line.lent_s / line.span_s, line.attainment


def admission_rows(size: Size, seeds: Sequence[int], folder: Path | None) -> list[dict[str, Any]]:
    with mock.patch.object(traffic, "TRACE", TRAFFIC):
        trace = traffic.load(folder, FRESH)
    rows = []
    for load in LOADS:
        base = [lent_and_kept(trace, load, seed, size.span_s) for seed in seeds]
        alone = statistics.median(lent_and_kept(trace, load, seed, size.span_s, lends=False)[1] for seed in seeds)
        for knob in ADMISSION_KNOBS:
            for variant, to in knob.variants():
                with knob.change(to):
                    pairs = [lent_and_kept(trace, load, seed, size.span_s) for seed in seeds]
                row = row_of("admission", knob, variant, to) | {
                    "load": load,
                    "alone": round(alone, 4),
                    "data": trace.what,
                }
                for place, name in enumerate(("lent_points", "kept_points")):
                    points = [100 * (pair[place] - one[place]) for pair, one in zip(pairs, base, strict=True)]
                    harness.put_ratio(row, name, points)
                rows.append(row)
    return rows


def row_of(table: str, knob: Knob, variant: str, to: float) -> dict[str, Any]:
    shown = "none" if math.isinf(to) else to
    return {
        "table": table, "number": knob.name, "default": knob.value, "variant": variant, "value": shown,
        "off_is": knob.off_is if variant == OFF else None,
    }  # fmt: skip


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--data", type=Path, default=os.environ.get("ROSE_DATA"), metavar="FOLDER")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="only these (all)")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size()
    folder = Path(arguments.data) if arguments.data else None
    seeds = [FRESH + arguments.seed + number for number in range(size.seeds)]
    begun, rows = harness.machine(), list[dict[str, Any]]()
    for table, knobs in (("router", ROUTER_KNOBS), ("lengths", LENGTH_KNOBS)):
        if table in arguments.tables:
            rows += batch_rows(table, knobs, size, seeds, folder)
    if "admission" in arguments.tables:
        rows += admission_rows(size, seeds, folder)
    for table, figures in (("router", ("completion",)), ("lengths", ("completion",)),
                           ("admission", ("lent_points", "kept_points"))):  # fmt: skip
        if table not in arguments.tables:
            continue
        ends = [name for figure in figures for name in (figure, f"{figure}_low", f"{figure}_high")]
        print(f"\n{table}, {len(seeds)} seeds")
        harness.print_table(
            [row for row in rows if row["table"] == table],
            ("number", "default", "variant", "value", "load", "alone", *ends, "off_is"),
        )
    return harness.finish(arguments, "sensitivity", rows, [], begun, seeds=seeds)


if __name__ == "__main__":
    raise SystemExit(main())
