"""Real processes, real tokens: 200 multi-turn trajectories on a dedicated worker, and on that and a device that serves.

Both in one run, alternating: first with the dedicated worker only, while the serving device serves its users and lends
nothing; then with the device lent. Agents follow scripts whose lengths are those of recorded coding agents, scaled by
one factor (`--data FOLDER` or ROSE_DATA, with trajectories/ in it; made up if there are none). Every trajectory is
compared, token by token, with what its agent saw: `lost` and `doubled` must be 0. `completion_s` is from the first turn
to the last trajectory in the trainer's hands, `completion_dedicated_s` the same without borrowing; `attainment` is what
the users of the serving device got of their budgets meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from living.playing import Outcome, play_all
from living.scripts import Script, load_scripts
from living.stage import OTHER_CORES, SERVING_CORE, Terms, staged

from rose.models.presets import PRESETS, write_preset

SETUPS = {"dedicated": False, "dedicated + borrowed": True}
COLUMNS = (
    "setup", "repeat", "trajectories", "turns", "tokens", "completion_s", "turn_p50_ms", "turn_p99_ms", "lost",
    "doubled", "evicted", "requests", "attainment",
)  # fmt: skip


def main() -> int:
    arguments = _options()
    begun = harness.machine()
    trajectories = arguments.trajectories or (60 if arguments.quick else 200)
    repeats = arguments.repeats or (1 if arguments.quick else 3)
    context = PRESETS[arguments.rollout].max_context_tokens
    scripts, source = load_scripts(arguments.data, trajectories, context, arguments.seed)
    print(f"{trajectories} trajectories, {sum(map(len, scripts))} turns ({source})")
    with tempfile.TemporaryDirectory() as place:
        rows = asyncio.run(_run(arguments, scripts, repeats, Path(place)))
    harness.print_table(rows, COLUMNS)
    overall = _overall(rows) | {"scripts": source, "cores": {"serving": SERVING_CORE, "others": list(OTHER_CORES)}}
    bars = [
        harness.wanted("lost", overall["lost"], 0, at_most=True),
        harness.wanted("doubled", overall["doubled"], 0, at_most=True),
    ]
    return harness.finish(arguments, "live", rows, bars, begun, **overall)


def _options() -> argparse.Namespace:
    options = harness.parser(__doc__ or "")
    data = Path(os.environ["ROSE_DATA"]) if "ROSE_DATA" in os.environ else None
    options.add_argument("--data", type=Path, default=data, metavar="FOLDER", help="where trajectories/ is (ROSE_DATA)")
    options.add_argument("--trajectories", type=int, help="how many (200; 60 with --quick)")
    options.add_argument("--repeats", type=int, help="of both set-ups, alternating (3; 1 with --quick)")
    options.add_argument("--concurrent", type=int, default=48, help="trajectories at once (48)")
    options.add_argument("--serving", default="qwen3-3m", choices=PRESETS, help="preset that serves users (qwen3-3m)")
    options.add_argument("--rollout", default="qwen3-3m", choices=PRESETS, help="preset that is trained (qwen3-3m)")
    options.add_argument("--traffic", default="gamma:rate=2,cv=2", help="on the serving device (gamma:rate=2,cv=2)")
    return options.parse_args()


async def _run(
    arguments: argparse.Namespace, scripts: Sequence[Script], repeats: int, place: Path
) -> list[dict[str, Any]]:
    terms = Terms(
        serving=write_preset(arguments.serving, place / "serving" / arguments.serving, seed=0),
        rollout=write_preset(arguments.rollout, place / "rollout" / f"{arguments.rollout}-rollout", seed=1),
        traffic=arguments.traffic,
        seed=arguments.seed,
        ttft_ms=500.0,
        tpot_ms=150.0,
        kv_memory_mb=1024,
        sequences=arguments.concurrent,
    )
    os.sched_setaffinity(0, OTHER_CORES)  # agents and trainer are no users: they keep off the serving device's core
    rows = []
    for repeat in range(repeats):
        for setup, is_lent in SETUPS.items() if repeat % 2 == 0 else reversed(SETUPS.items()):
            logs = place / "logs" / f"{repeat}-{setup.replace(' ', '')}"
            async with staged(terms, logs, is_lent=is_lent) as stage:
                outcome = await play_all(stage.url, stage.token, scripts, arguments.concurrent, arguments.seed)
                rows.append(_row(setup, repeat, len(scripts), outcome, stage.verdicts))
            print(f"{setup}: {outcome.completion_s:.1f} s, lost {outcome.lost}, doubled {outcome.doubled}")
    return rows


def _row(setup: str, repeat: int, trajectories: int, outcome: Outcome, verdicts: Sequence[bool]) -> dict[str, Any]:
    return {
        "setup": setup,
        "repeat": repeat,
        "trajectories": trajectories,
        "turns": outcome.turns,
        "tokens": outcome.tokens,
        "completion_s": round(outcome.completion_s, 2),
        "turn_p50_ms": round(1e3 * float(np.percentile(outcome.turn_s, 50)), 2),
        "turn_p99_ms": round(1e3 * float(np.percentile(outcome.turn_s, 99)), 2),
        "lost": outcome.lost,
        "doubled": outcome.doubled,
        "evicted": outcome.counts["evicted"],
        "requests": len(verdicts),
        "attainment": round(sum(verdicts) / len(verdicts), 4) if verdicts else None,
        "counts": outcome.counts,
    }


def _overall(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    taken = {setup: [row["completion_s"] for row in rows if row["setup"] == setup] for setup in SETUPS}
    alone, borrowed = taken["dedicated"], taken["dedicated + borrowed"]
    found: dict[str, Any] = {
        "lost": sum(row["lost"] for row in rows),
        "doubled": sum(row["doubled"] for row in rows),
        "completion_s": statistics.median(borrowed),
        "completion_dedicated_s": statistics.median(alone),
    }
    harness.put_ratio(found, "borrow_gain", [before / after for before, after in zip(alone, borrowed)])
    return found


if __name__ == "__main__":
    sys.exit(main())
