"""How soon a batch of trajectories ends on dedicated and borrowed devices, by router, in virtual time.

The paper's two set-ups with H800 profiles: `8b`, 8 dedicated and 16 borrowed devices, and `32b`, 16 and 64 devices in
tensor-parallel groups of four (a group is one worker). Router, pacer and provisioner are the real ones. What a borrowed
device lends and what its users notice comes from a step-by-step run of that device under the real rules of lending,
with rollouts that always ask for a full step (`rose.sim.lent_timeline`); rollout workers are a batch model
(`rose.sim.batch_worker`).

`borrow_gain` is the completion time without borrowed devices over that with them, same router. `over_lower_bound` is
against the larger of the longest trajectory alone on a dedicated worker and all work over all usable capacity. In the
worst case every borrowed device is loaded to its limit at once, for minutes, from when the batch is in full swing.

Both set-ups are run at half their size (--shrink 1 for the whole), an eighth with --quick: a run takes half an hour, or
five. A batch is so large that dedicated workers alone are busy throughout: 2,048 trajectories at full size.

    python benchmarks/schedule.py --data FOLDER      FOLDER/trajectories and FOLDER/traces; or set ROSE_DATA

Without the recorded data a seeded generator stands in, and the rows say so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
from scheduling import traffic, trajectories
from scheduling.baselines import ROUTERS, make_router
from scheduling.figures import row_of
from scheduling.trajectories import Source

from rose.config.server_settings import GatewaySettings
from rose.core.slo import Budgets
from rose.engines.profiles import StepProfile, load_profile
from rose.sim.batch_cluster import BatchCluster, PlannedTrajectory
from rose.sim.lent_timeline import LentTimeline, SaturatedDevice, saturated_requests_per_s
from rose.sim.routing_bound import lower_bound_s

GROUP = 16
LOAD = 0.2  # of what serving alone can do; the paper's trace has 18.9 % of compute
SPIKE_LOAD = 1.0
SPIKE_S = (60.0, 240.0)
LIKENESS = (0.0, 0.5, 0.9)
COMPARED = ("cost", "paper")
DISTINCT_DEVICES = 8  # the others see the same traffic at another time
COLUMNS = (
    "setup", "trace", "likeness", "case", "router", "borrowed", "completion_s", "p95_trajectory_s", "turn_p99_s",
    "prefix_hit_ratio", "reprefilled_tokens", "evictions", "idle_share", "over_lower_bound", "borrow_gain",
    "attainment", "attainment_alone",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setup:
    """`size` trajectories on so many dedicated and borrowed workers."""

    name: str
    serving: str
    rollout: str
    budgets: Budgets
    dedicated: int
    borrowed: int
    trajectories: int
    span_s: float = 400.0

    def shrunk(self, by: int) -> Setup:
        """Return a smaller set-up with the same mix of workers."""
        by = min(by, self.dedicated)
        return replace(self, dedicated=max(1, self.dedicated // by), borrowed=max(1, self.borrowed // by),
                       trajectories=self.trajectories // by, span_s=300.0)  # fmt: skip

    @property
    def profile(self) -> StepProfile:
        return load_profile(self.rollout)


SETUPS = (
    Setup("8b", "h800-qwen2.5-7b", "h800-qwen3-8b", Budgets(0.5, 0.15), 8, 16, 2048),
    Setup("32b", "h800-qwen2.5-32b", "h800-qwen3-32b", Budgets(1.0, 0.45), 4, 16, 2048),
)


@dataclass(frozen=True, slots=True)
class Lent:
    """The timelines of a set-up's borrowed devices, and the SLO attainment with and without lending."""

    timelines: list[LentTimeline]
    attainment: float
    attainment_alone: float


def lend(setup: Setup, trace: traffic.Trace, is_worst: bool, seed: int) -> Lent:
    serving, rollout = load_profile(setup.serving), setup.profile
    most = saturated_requests_per_s(serving, setup.budgets, list(trace.requests[:600])) / trace.requests_per_s
    spike = (*SPIKE_S, SPIKE_LOAD * most) if is_worst else None
    lent, alone = [], []
    for number in range(min(setup.borrowed, DISTINCT_DEVICES)):
        arrivals = traffic.spiked(trace, number + seed, setup.span_s, LOAD * most, spike)
        for lends, timelines_of in ((True, lent), (False, alone)):
            device = SaturatedDevice(
                serving, rollout, setup.budgets, arrivals, setup.span_s, number + seed, lends=lends
            )
            timelines_of.append(device.run())
    timelines = [lent[device % len(lent)] for device in range(setup.borrowed)]
    if not is_worst:
        timelines = [line.shifted(line.span_s / 2) if i >= len(lent) else line for i, line in enumerate(timelines)]
    return Lent(timelines, _attained(lent), _attained(alone))


def _attained(lines: Sequence[LentTimeline]) -> float:
    return sum(line.attainment * line.requests for line in lines) / max(1, sum(line.requests for line in lines))


def run(setup: Setup, kind: str, drawn: Sequence[PlannedTrajectory], timelines: list[LentTimeline]) -> dict[str, Any]:
    begin_s = time.perf_counter()
    router = make_router(kind, blocked_patience_s=GatewaySettings().gated_s)
    result = BatchCluster(
        router, setup.profile, setup.dedicated, timelines, drawn, tries_every_arrival=kind == "sticky"
    ).run()
    row = row_of(result, lower_bound_s(setup.profile, setup.dedicated, timelines, drawn))
    return {"router": kind, "borrowed": len(timelines), **row, "wall_s": round(time.perf_counter() - begin_s, 1)}


def plan(sources: Sequence[Source], arguments: Any) -> Iterator[tuple[Source, float, str, bool]]:
    """Yield (trajectories, likeness, router, whether also without borrowing)."""
    middle = sorted(arguments.likeness)[len(arguments.likeness) // 2 if len(arguments.likeness) > 2 else 0]
    for number, source in enumerate(sources):
        for likeness in arguments.likeness:
            for kind in arguments.routers:
                is_middle = likeness == middle
                if (number == 0 and is_middle) or (kind in COMPARED and (number == 0 or is_middle)):
                    yield source, likeness, kind, is_middle or kind == "cost"


def rows_of(
    setup: Setup, source: Source, likeness: float, kind: str, lent: Lent, *, case: str, both: bool, seed: int
) -> list[dict[str, Any]]:
    drawn = trajectories.draw(source, setup.trajectories // GROUP, GROUP, likeness, seed)
    named = {"setup": setup.name, "trace": source.what, "likeness": likeness, "case": case}
    row = named | run(setup, kind, drawn, lent.timelines)
    row |= {"attainment": round(lent.attainment, 4), "attainment_alone": round(lent.attainment_alone, 4)}
    row["borrow_gain"] = None
    if not both:
        return [row | {"borrow_gain_why": "without borrowing this router was run at another likeness only"}]
    without = named | run(setup, kind, drawn, [])
    row["borrow_gain"] = round(without["completion_s"] / row["completion_s"], 3)
    return [without, row]


def measure(setup: Setup, trace: traffic.Trace, sources: Sequence[Source], arguments: Any) -> list[dict[str, Any]]:
    rows, seed = [], arguments.seed
    lent = lend(setup, trace, False, seed)
    for source, likeness, kind, both in plan(sources, arguments):
        rows += rows_of(setup, source, likeness, kind, lent, case="usual", both=both, seed=seed)
    worst = lend(setup, trace, True, seed)
    for kind in [kind for kind in arguments.routers if kind in COMPARED]:
        row = rows_of(setup, sources[0], 0.5, kind, worst, case="worst", both=False, seed=seed)[0]
        alike = (sources[0].what, 0.5, kind, 0)
        without = [old for old in rows if (old["trace"], old["likeness"], old["router"], old["borrowed"]) == alike]
        if without:
            row["borrow_gain"] = round(without[0]["completion_s"] / row["completion_s"], 3)
            del row["borrow_gain_why"]
        rows.append(row)
    return rows


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for setup in dict.fromkeys(row["setup"] for row in rows):
        mine = [row for row in rows if row["setup"] == setup and row["borrowed"]]
        usual = [row for row in mine if row["case"] == "usual"]
        gains = [row["borrow_gain"] for row in usual if row["router"] == "cost" and row["borrow_gain"]]
        ratios = _against_paper(usual)
        tails = [ratio for likeness, ratio in ratios if likeness == 0.9]
        worst = [row for row in mine if row["case"] == "worst" and row["router"] == "cost"]
        worst = [row for row in worst if row["borrow_gain"] is not None]
        if gains:
            made.append(harness.wanted(f"{setup}: borrow_gain of cost, the least", min(gains), 1.3))
        if ratios:
            least = min(ratio for _, ratio in ratios)
            made.append(harness.wanted(f"{setup}: completion of paper over cost, the least", least, 0.98))
        if tails:
            made.append(harness.wanted(f"{setup}: the same where whole groups are long", min(tails), 1.1))
        for row in worst:
            lost = round(row["attainment_alone"] - row["attainment"], 4)
            made.append(harness.wanted(f"{setup}: worst case, attainment lost to lending", lost, 0.002, at_most=True))
            made.append(harness.wanted(f"{setup}: worst case, dedicated only over borrowed", row["borrow_gain"], 0.98))
    return made


def _against_paper(rows: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return (likeness, completion of `paper` over that of `cost`) of every case."""
    completion_s = {(row["trace"], row["likeness"], row["router"]): row["completion_s"] for row in rows}
    pairs = [(trace, likeness) for trace, likeness, router in completion_s if router == "cost"]
    return [
        (likeness, round(completion_s[trace, likeness, "paper"] / completion_s[trace, likeness, "cost"], 3))
        for trace, likeness in pairs
        if (trace, likeness, "paper") in completion_s
    ]


def options() -> Any:
    parser = harness.parser(__doc__ or "")
    data = os.environ.get("ROSE_DATA")
    parser.add_argument("--data", type=Path, default=Path(data) if data else None, help="folder of recorded data")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--setups", nargs="+", choices=[setup.name for setup in SETUPS], default=["8b", "32b"])
    parser.add_argument("--likeness", nargs="+", type=float, help="of siblings (0 0.5 0.9, or 0.5 0.9 with --quick)")
    parser.add_argument("--files", nargs="+", choices=trajectories.FILES, help="both, or the first with --quick")
    parser.add_argument("--shrink", type=int, help="workers and trajectories by this factor (2, or 8 with --quick)")
    arguments = parser.parse_args()
    arguments.likeness = arguments.likeness or list(LIKENESS[1:] if arguments.quick else LIKENESS)
    arguments.files = arguments.files or list(trajectories.FILES[:1] if arguments.quick else trajectories.FILES)
    arguments.shrink = arguments.shrink or (8 if arguments.quick else 2)
    return arguments


def main() -> int:
    arguments = options()
    begun, begin_s, rows = harness.machine(), time.monotonic(), []
    trace = traffic.load(arguments.data, arguments.seed)
    sources = [trajectories.load(name, arguments.data, arguments.seed) for name in arguments.files]
    sources = list({source.what: source for source in sources}.values())
    for what in (trace.what, *(source.what for source in sources)):
        print(what)
    shrink = arguments.shrink
    for setup in [setup.shrunk(shrink) if shrink > 1 else setup for setup in SETUPS if setup.name in arguments.setups]:
        measured = measure(setup, trace, sources, arguments)
        rows += measured
        harness.print_table(measured, COLUMNS)
        print(flush=True)
    notes = {"traffic": trace.what, "load": LOAD, "spike_load": SPIKE_LOAD, "spike_s": SPIKE_S, "shrunk_by": shrink,
             "length_factors": {source.what: round(source.factor, 4) for source in sources},
             "seconds": round(time.monotonic() - begin_s)}  # fmt: skip
    wanted = bars(rows)
    for row in rows:
        row |= {key: None for key in COLUMNS if key not in row}
        if not row["borrowed"]:
            row["reason"] = "nothing is borrowed: no gain and no serving"
    return harness.finish(arguments, "schedule", rows, wanted, begun, **notes)


if __name__ == "__main__":
    raise SystemExit(main())
