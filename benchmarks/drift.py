"""What the brake on drifted tokens (train.loss.stops_drifted) is worth: learning from old tokens three ways, by seed.

    python benchmarks/drift.py --json FILE

    with      every batch was drawn two versions ago, and a token that has left the clipping range is pushed no further
    without   the same, and tokens are pushed however far they went
    on time   every batch was drawn by the weights that learn from it

Engine and trainer share this process, so that the age of every batch is exact and a job repeats bit by bit on the same
machine. Few groups a step and long answers are the hard case (`--task plan`, the default), eight groups of short
answers the usual one (`--task short`). A seed is a set of maps; the three ways of a seed begin with the same ones. Two
seeds tell little, and so does one machine: in the hard case the last bits of a processor decide which way a job goes.

A job takes one to three minutes. `--runs FOLDER` keeps what was measured (benchmarks/pieces.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import pieces

sys.path.insert(0, str(harness.PROJECT))
from tests.local_rollouts import LocalRollouts, Task, synchronous

from rose.config.server_settings import EngineSettings
from rose.core.groups import GroupRules
from rose.engines.embedded.engine import EmbeddedEngine
from rose.train.checkpoint import export_model
from rose.train.policy_model import CausalModel, use_threads
from rose.train.step import StepReport, Trainer
from rose.train.train_settings import TrainSettings
from rose.train.warmstart import warm_start

GROUPS_PER_SEED = 1 << 16
SEEDS, SEEDS_QUICK = 3, 1
STEPS, STEPS_QUICK = 8, 3
HELD_OUT, HELD_OUT_QUICK = 200, 50
COLUMNS = ("seed", "way", "before", "after", "gap_max", "gap_last", "drifted_share", "updated", "took_s")


@dataclass(frozen=True, slots=True)
class Way:
    versions_old: int
    stops_drifted: bool


@dataclass(frozen=True, slots=True)
class Kind:
    environment: str
    rules: GroupRules


WAYS = {"with": Way(2, True), "without": Way(2, False), "on time": Way(0, True)}
KINDS = {
    "plan": Kind("frozenlake-plan", GroupRules(groups=2, size=48, train_size=8, draws_max=8)),
    "short": Kind("frozenlake", GroupRules(groups=8, size=8)),
}


def main() -> int:
    arguments = options().parse_args()
    begun = harness.machine()
    use_threads(1)
    jobs = jobs_of(arguments)
    if arguments.list:
        print("\n".join(pieces.chosen(list(jobs), arguments.only)))
        return 0
    steps, episodes = steps_of(arguments), HELD_OUT_QUICK if arguments.quick else HELD_OUT
    asked = {name: [f"task={arguments.task}", f"steps={steps}", f"episodes={episodes}"] for name in jobs}

    def measure(name: str, runs: Path) -> dict[str, Any]:
        seed, way = jobs[name]
        return {"seed": seed, "way": way} | learnt(KINDS[arguments.task], WAYS[way], seed, steps, episodes)

    rows = pieces.rows_of(arguments, asked, measure)
    harness.print_table(rows, COLUMNS)
    figures = overall(rows)
    return harness.finish(arguments, "drift", rows, bars(figures), begun, task=arguments.task, **figures)


def options() -> argparse.ArgumentParser:
    made = harness.parser(__doc__ or "")
    made.add_argument("--task", choices=sorted(KINDS), default="plan", help="what is learnt (plan)")
    made.add_argument("--seeds", type=int, help=f"how many seeds ({SEEDS}, quick {SEEDS_QUICK})")
    made.add_argument("--steps", type=int, help=f"steps of each job ({STEPS}, quick {STEPS_QUICK})")
    pieces.add_options(made)
    return made


def jobs_of(arguments: argparse.Namespace) -> dict[str, tuple[int, str]]:
    """Seed and way of every job, by its name."""
    count = arguments.seeds or (SEEDS_QUICK if arguments.quick else SEEDS)
    seeds = range(arguments.seed, arguments.seed + count)
    return {f"seed-{seed}-{way.replace(' ', '-')}": (seed, way) for seed in seeds for way in WAYS}


def steps_of(arguments: argparse.Namespace) -> int:
    steps: int = arguments.steps or (STEPS_QUICK if arguments.quick else STEPS)
    return steps


def learnt(kind: Kind, way: Way, seed: int, steps: int, episodes: int) -> dict[str, Any]:
    """One job, from the same warm start as every other."""
    model, task = warm_start(kind.environment), Task(kind.environment)
    settings = TrainSettings()
    settings = replace(settings, loss=replace(settings.loss, stops_drifted=way.stops_drifted))
    engine = EmbeddedEngine.load(model, EngineSettings(kv_memory_mb=256))
    rollouts, trainer = LocalRollouts(engine, model, task), Trainer(CausalModel.load(model), settings)
    groups = synchronous(kind.rules, next_group=seed * GROUPS_PER_SEED)
    before = rollouts.success_rate(episodes)
    drawn: deque[Any] = deque()
    reports: list[StepReport] = []
    with tempfile.TemporaryDirectory(prefix="rose-benchmark-") as published:
        for step in range(1, steps + 1):
            while len(drawn) <= way.versions_old:
                drawn.append(rollouts.play_groups(groups))
            reports.append(trainer.learn(*drawn.popleft(), str(trainer.step)))
            version = str(trainer.step)
            engine.swap(engine.stage(version, export_model(trainer.model, model, Path(published) / str(step))))
            print(f"  step {step}/{steps}: gap {reports[-1].logprob_gap_mean:.3f} nats", flush=True)
    return {"before": before, "after": rollouts.success_rate(episodes)} | told(reports)


def told(reports: Sequence[StepReport]) -> dict[str, Any]:
    gaps = [round(report.logprob_gap_mean, 4) for report in reports]
    return {
        "gap_by_step": gaps,
        "gap_max": max(gaps),
        "gap_last": gaps[-1],
        "drifted_share": round(fmean(report.drifted_share for report in reports), 4),
        "updated": sum(report.verdict == "updated" for report in reports),
        "staleness_max": max(report.staleness_max for report in reports),
    }


def overall(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the seeds that have both: what the brake changes, in the mean."""
    found = {(row["seed"], row["way"]): row for row in rows}
    seeds = sorted({seed for seed, _ in found if (seed, "with") in found and (seed, "without") in found})
    pairs = [(found[seed, "with"], found[seed, "without"]) for seed in seeds]
    return {
        "seeds": len(pairs),
        "success_gained": round(fmean(one["after"] - other["after"] for one, other in pairs), 4) if pairs else None,
        "gap_saved": round(fmean(other["gap_max"] - one["gap_max"] for one, other in pairs), 4) if pairs else None,
    }


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        harness.wanted("final success with the brake less without, mean", figures["success_gained"], 0.0),
        harness.wanted("largest gap without the brake less with, nats a token, mean", figures["gap_saved"], 0.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
