"""Learning curves with and without borrowing, over three seeds: does it matter to what is learnt who plays the turns?

For every seed the same job runs twice, as a user would start it: with a dedicated worker alone, and with a device
borrowed from users beside it. A turn comes out the same wherever and beside whatever it is computed, so that in
synchronous training the weights must be equal after every step, bit by bit: `weights_hash` of every step is compared.
With `--asynchronous` what a batch holds depends on who was quicker. There the final success is compared: the mean of
the differences between the two jobs of a seed, and its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np

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
    cases = [(arguments.seed + number, setup) for number in range(arguments.seeds) for setup in SETUPS]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rose-curves-") as runs:
        for number, (seed, setup) in enumerate(cases, 1):
            print(f"job {number} of {len(cases)}: seed {seed}, {setup}", flush=True)
            rows.append(job(Path(runs), seed, setup, arguments))
    pairs = list(zip(rows[::2], rows[1::2]))
    for alone, borrowed in pairs:
        borrowed |= compared(alone["weights_hashes"], borrowed["weights_hashes"])
    harness.print_table(rows, COLUMNS)
    figures = overall(pairs)
    return harness.finish(arguments, "curves", rows, bars(figures, arguments.asynchronous), begun, **figures)


def options() -> argparse.ArgumentParser:
    made = harness.parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=SEEDS, choices=sorted(STUDENT_T), help="how many seeds (3)")
    made.add_argument("--steps", type=int, help=f"steps of each job ({STEPS}, quick {STEPS_QUICK})")
    made.add_argument("--asynchronous", action="store_true", help="rollouts never stop")
    made.add_argument("--model", type=Path, metavar="FOLDER", help="the model to train (a warm start)")
    return made


def job(runs: Path, seed: int, setup: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, as a user starts it; its curves."""
    steps = arguments.steps or (STEPS_QUICK if arguments.quick else STEPS)
    name = f"seed-{seed}-{'borrowed' if SETUPS[setup] else 'dedicated'}"
    given = [f"runs={runs}", f"seed={seed}", f"steps={steps}", "checkpoint.every_steps=0"]
    given += [f"serving.is_borrowed={str(SETUPS[setup]).lower()}"]
    given += [f"asynchrony.is_used={str(arguments.asynchronous).lower()}"]
    given += ["evaluation.episodes=100", f"evaluation.every_steps={steps}"] if arguments.quick else []
    given += [f"rollout_model={arguments.model}"] if arguments.model else []
    command = [sys.executable, "-m", "rose", "run", "--name", name]
    subprocess.run([*command, *(word for override in given for word in ("--set", override))], check=True)
    lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((runs / name / "summary.json").read_text())
    sync = "asynchronous" if arguments.asynchronous else "synchronous"
    return {"seed": seed, "setup": setup, "sync": sync} | curves(lines) | figures_of(summary)


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
    borrowed = [other for _, other in pairs]
    differences = [other["success_after"] - one["success_after"] for one, other in pairs]
    middle, low, high = interval(differences)
    return {
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


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval."""
    mean = float(np.mean(values))
    half = STUDENT_T[len(values)] * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return round(mean, 4), round(mean - half, 4), round(mean + half, 4)


def bars(figures: dict[str, Any], is_asynchronous: bool) -> list[dict[str, Any]]:
    wanted = harness.wanted
    found = [
        wanted("share of turns that were borrowed", figures["borrowed_share"], 0.01),
        wanted("trajectories lost", figures["lost"], 0, at_most=True),
        wanted("trajectories counted twice", figures["doubled"], 0, at_most=True),
    ]
    if is_asynchronous:
        return [wanted("difference of final success, upper end", figures["success_difference_high"], 0.0), *found]
    return [wanted("steps after which the weights are equal, bit by bit", figures["equal_share"], 1.0), *found]


if __name__ == "__main__":
    sys.exit(main())
