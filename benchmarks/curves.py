"""Learning curves with and without borrowing, over three seeds: does it matter to what is learnt who plays the turns?

For every seed the same job runs twice, as a user would start it: with a dedicated worker alone, and with a device
borrowed from users beside it. A turn comes out the same wherever and beside whatever it is computed, so that in
synchronous training the weights must be equal after every step, bit by bit: `weights_hash` of every step is compared.
With `--asynchronous` what a batch holds depends on who was quicker. There the final success is compared: the mean of
the differences between the two jobs of a seed, and its 95 % interval (Student's t).

A job of twenty steps takes two minutes. `--runs FOLDER` keeps what was run, so that a call may take one seed only
(`--only 'seed-1-*'`) and another, with `--collect`, compares them all (benchmarks/pieces.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pieces

SETUPS = {"dedicated": False, "dedicated + borrowed": True}
SEEDS = 3
STEPS, STEPS_QUICK = 20, 4
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 %, by the number of seeds
COLUMNS = (
    "seed", "setup", "sync", "steps", "step_s", "success_before", "success_after", "borrowed_turns", "turns",
    "equal_steps", "first_difference", "lost", "doubled",
)  # fmt: skip


def main() -> int:
    arguments = options().parse_args()
    begun = harness.machine()
    jobs = jobs_of(arguments)
    if arguments.list:
        print("\n".join(pieces.chosen(list(jobs), arguments.only)))
        return 0
    sync = "asynchronous" if arguments.asynchronous else "synchronous"
    asked = {name: asked_of(*jobs[name], arguments) for name in jobs}

    def measure(name: str, runs: Path) -> dict[str, Any]:
        seed, setup = jobs[name]
        return {"seed": seed, "setup": setup, "sync": sync} | run(name, asked[name], runs)

    rows = pieces.rows_of(arguments, asked, measure)
    pairs = pairs_of(rows)
    for alone, borrowed in pairs:
        borrowed |= compared(alone["weights_hashes"], borrowed["weights_hashes"])
    harness.print_table(rows, COLUMNS)
    if not pairs:
        print("\nno seed has both of its jobs yet: nothing to compare")
        return 1
    figures = overall(pairs)
    found = bars(figures, arguments.asynchronous, arguments.seeds)
    return harness.finish(arguments, "curves", rows, found, begun, **figures)


def options() -> argparse.ArgumentParser:
    made = harness.parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=SEEDS, choices=sorted(STUDENT_T), help="how many seeds (3)")
    made.add_argument("--steps", type=int, help=f"steps of each job ({STEPS}, quick {STEPS_QUICK})")
    made.add_argument("--asynchronous", action="store_true", help="rollouts never stop")
    made.add_argument("--model", type=Path, metavar="FOLDER", help="the model to train (a warm start)")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of every run")
    pieces.add_options(made)
    return made


def jobs_of(arguments: argparse.Namespace) -> dict[str, tuple[int, str]]:
    """Seed and set-up of every job, by its name."""
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    return {f"seed-{seed}-{'borrowed' if SETUPS[setup] else 'dedicated'}": (seed, setup)
            for seed in seeds for setup in SETUPS}  # fmt: skip


def asked_of(seed: int, setup: str, arguments: argparse.Namespace) -> list[str]:
    """The settings of its run."""
    steps = arguments.steps or (STEPS_QUICK if arguments.quick else STEPS)
    asked = [f"seed={seed}", f"steps={steps}", "checkpoint.every_steps=0"]
    asked += [f"serving.is_borrowed={str(SETUPS[setup]).lower()}"]
    asked += [f"asynchrony.is_used={str(arguments.asynchronous).lower()}"]
    asked += ["evaluation.episodes=100", f"evaluation.every_steps={steps}"] if arguments.quick else []
    asked += [f"rollout_model={arguments.model}"] if arguments.model else []
    return asked + list(arguments.set)


def run(name: str, asked: list[str], runs: Path) -> dict[str, Any]:
    """As a user starts it; its curves."""
    command = [sys.executable, "-m", "rose", "run", "--name", name, "--set", f"runs={runs}"]
    pieces.ran([*command, *(word for setting in asked for word in ("--set", setting))])
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((runs / name / "summary.json").read_text())
    return curves(lines) | figures_of(summary)


def pairs_of(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of every seed that has both jobs: without and with the borrowed device."""
    found = {(row["seed"], SETUPS[row["setup"]]): row for row in rows}
    seeds = sorted({seed for seed, _ in found})
    return [
        (found[seed, False], found[seed, True]) for seed in seeds if (seed, False) in found and (seed, True) in found
    ]


def curves(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    steps = [line for line in lines if line["kind"] == "step"]
    held_out = {line["step"]: line["success_rate"] for line in lines if line["kind"] == "evaluation"}
    return {
        "success_by_step": [round(line["successes"] / max(1, line["trajectories"]), 4) for line in steps],
        "held_out_by_step": held_out,
        "weights_hashes": [line.get("weights_hash", "") for line in steps],  # "" if the step changed nothing
        "verdicts": [line["verdict"] for line in steps],
    }


def figures_of(summary: dict[str, Any]) -> dict[str, Any]:
    kept = ("steps", "step_s", "success_before", "success_after", "turns", "lost", "doubled")
    return {key: summary[key] for key in kept} | {"borrowed_turns": summary["turns_by_pool"]["borrowed"]}


def compared(alone: Sequence[str], borrowed: Sequence[str]) -> dict[str, Any]:
    """Steps after which both had the same weights, and the first after which they had not."""
    equal = [one == other for one, other in zip(alone, borrowed, strict=True)]
    return {"equal_steps": sum(equal), "first_difference": equal.index(False) + 1 if not all(equal) else None}


def overall(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Over the seeds that have both jobs; one alone has no interval."""
    borrowed = [other for _, other in pairs]
    differences = [other["success_after"] - one["success_after"] for one, other in pairs]
    middle, low, high = interval(differences)
    return {
        "seeds": len(pairs),
        "equal_share": round(sum(row["equal_steps"] for row in borrowed) / sum(row["steps"] for row in borrowed), 4),
        "is_bit_equal": all(row["first_difference"] is None for row in borrowed),
        "borrowed_share": round(
            sum(row["borrowed_turns"] for row in borrowed) / max(1, sum(row["turns"] for row in borrowed)), 4
        ),
        "success_difference": middle,
        "success_difference_low": low,
        "success_difference_high": high,
        "lost": sum(row["lost"] for pair in pairs for row in pair),
        "doubled": sum(row["doubled"] for pair in pairs for row in pair),
    }


def interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean and its 95 % interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return round(mean, 4), None, None
    half = STUDENT_T[len(values)] * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return round(mean, 4), round(mean - half, 4), round(mean + half, 4)


def bars(figures: dict[str, Any], is_asynchronous: bool, seeds: int = SEEDS) -> list[dict[str, Any]]:
    wanted = harness.wanted
    found = [
        wanted("seeds with both jobs", figures["seeds"], seeds),
        wanted("share of turns that were borrowed", figures["borrowed_share"], 0.01),
        wanted("trajectories lost", figures["lost"], 0, at_most=True),
        wanted("trajectories counted twice", figures["doubled"], 0, at_most=True),
    ]
    if is_asynchronous:
        return [wanted("difference of final success, upper end", figures["success_difference_high"], 0.0), *found]
    return [wanted("steps after which the weights are equal, bit by bit", figures["equal_share"], 1.0), *found]


if __name__ == "__main__":
    sys.exit(main())
