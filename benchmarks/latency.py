"""How well the latency model foretells steps of the embedded engine: coverage of its upper estimate, and its errors.

A model is profiled as a device does at its start, and then meets random mixes: 1 to 64 requests, short and long
prompts, whole and partial steps, each mix for about a second. It is asked before every step and told after it. Keys:
`coverage` (share of steps at or under the upper estimate), `upper_over_actual` (mean), `mae_share` (mean absolute
error over the actual time, for steps of 5 ms and more). `floor_mae_share` is that error for a fixed computation of
about 5 ms in the same minute, foretold by the best of several running means: what the machine itself leaves open.

    python benchmarks/latency.py --quick
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np

from rose.config.device import EngineSettings
from rose.core.latency import LatencyModel
from rose.coserve.profiling import profile
from rose.engines.base import Budget, Request, Sampling, StepPlan
from rose.engines.embedded.engine import EmbeddedEngine
from rose.models.presets import write_preset

PRESETS = ("qwen3-3m", "frozenlake-1m")
LONG_S = 0.005
WARM_S = 3.0  # of mixes that are learnt from but not counted: memory is touched for the first time
FLOOR_S = 5.0
WIDE = Budget(512, 64)
COLUMNS = ("model", "case", "steps", "coverage", "upper_over_actual", "mae_share", "floor_mae_share", "profile_s")


class Mixes:
    """Keeps an engine busy with one random mix after another; `plan` is its next step."""

    def __init__(self, engine: EmbeddedEngine, seed: int) -> None:
        self.engine = engine
        self.chance = random.Random(seed)
        self.added = 0
        self.change_at_s = 0.0

    def plan(self) -> StepPlan | None:
        chance, now_s = self.chance, time.perf_counter()
        if now_s > self.change_at_s:
            self.change_at_s = now_s + chance.uniform(0.3, 1.5)
            self.requests = chance.choice((1, 2, 4, 8, 16, 32, 64))
            self.prompts = chance.choice(((4, 64), (32, 512), (256, 2000)))
            self.is_partial = chance.random() < 0.3
        facts = self.engine.facts()
        for _ in range(self.requests - facts.running - facts.waiting):
            self._add()
        is_partial = self.is_partial and chance.random() < 0.3
        return self.engine.plan(Budget(chance.choice((1, 16, 64, 256)), chance.randint(1, 64)) if is_partial else WIDE)

    def _add(self) -> None:
        least, most = self.prompts
        tokens = int(math.exp(self.chance.uniform(math.log(least), math.log(most))))
        prompt = tuple(self.chance.choices(range(90), k=tokens))
        sampling = Sampling(max_tokens=self.chance.randint(2, 80), ignore_eos=True, seed=self.added)
        self.engine.add(Request(f"r{self.added}", prompt, sampling))
        self.added += 1


def run(engine: EmbeddedEngine, model: LatencyModel, seconds: float, seed: int) -> np.ndarray[Any, Any]:
    """(predicted, upper, actual) of every step after the warm-up."""
    mixes, begun_s, rows = Mixes(engine, seed), time.perf_counter(), []
    while (since_s := time.perf_counter() - begun_s) < WARM_S + seconds:
        plan = mixes.plan()
        if plan is None:
            continue
        features = plan.features
        asked = model.predict(features), model.upper(features)
        begin_s = time.perf_counter()
        engine.step(plan)
        taken_s = time.perf_counter() - begin_s
        model.observe(features, taken_s)
        if model.is_refit_due:
            model.refit()
        if since_s > WARM_S:
            rows.append((*asked, taken_s))
    return np.array(rows)


def floor_mae_share() -> float:
    """The error left when nothing about the work changes."""
    left, right = np.ones((96, 256), np.float32), np.ones((256, 256), np.float32)
    taken, begun_s = [], time.perf_counter()
    while time.perf_counter() - begun_s < FLOOR_S:
        begin_s = time.perf_counter()
        for _ in range(40):
            left @ right
        taken.append(time.perf_counter() - begin_s)
    return min(_mae_of_running_mean(taken, rate) for rate in (0.05, 0.1, 0.2, 0.4, 0.8))


def _mae_of_running_mean(taken: list[float], rate: float) -> float:
    mean_log, errors = math.log(taken[0]), []
    for taken_s in taken[1:]:
        errors.append(abs(math.exp(mean_log) / taken_s - 1))
        mean_log += rate * max(-0.2, min(0.2, math.log(taken_s) - mean_log))
    return sum(errors) / len(errors)


def _spin(core: int) -> None:
    os.sched_setaffinity(0, [core])
    left = np.random.default_rng(0).random((512, 512), np.float32)
    while True:
        left @ left


@contextmanager
def busy(core: int | None) -> Iterator[None]:
    """Somebody computes on another core meanwhile."""
    if core is None:
        yield
        return
    other = multiprocessing.get_context("spawn").Process(target=_spin, args=(core,), daemon=True)
    other.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        other.kill()
        other.join()


def measure(preset: str, case: str, folder: Path, arguments: Any) -> dict[str, Any]:
    settings = EngineSettings(max_step_tokens=WIDE.tokens, max_sequences=WIDE.sequences, kv_memory_mb=96)
    engine = EmbeddedEngine.load(folder, settings, device=f"cpu:{arguments.core}")
    gc.collect()
    gc.freeze()
    model, begun_s = LatencyModel(), time.perf_counter()
    profile(engine, model, WIDE.tokens)
    profile_s = time.perf_counter() - begun_s
    with busy(arguments.other_core if case == "other core busy" else None):
        found = run(engine, model, 20.0 if arguments.quick else 60.0, arguments.seed)
        floor = floor_mae_share()
    engine.close()
    predicted, upper, actual = found.T
    is_long = actual >= LONG_S
    error = np.abs(predicted - actual)[is_long] / actual[is_long]
    return {
        "model": preset,
        "case": case,
        "steps": len(found),
        "coverage": round(float((actual <= upper).mean()), 4),
        "upper_over_actual": round(float((upper / actual).mean()), 3),
        "mae_share": round(float(error.mean()), 4),
        "floor_mae_share": round(floor, 4),
        "profile_s": round(profile_s, 1),
    }


def main() -> int:
    parser = harness.parser(__doc__ or "")
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--core", type=int, default=cores[-1])
    parser.add_argument("--other-core", type=int, default=cores[0])
    arguments = parser.parse_args()
    os.sched_setaffinity(0, [arguments.core])
    begun, rows = harness.machine(), []
    cases = ["other core idle"] + (["other core busy"] if arguments.other_core != arguments.core else [])
    with tempfile.TemporaryDirectory() as folder:
        for preset in PRESETS:
            model = write_preset(preset, Path(folder) / preset, seed=arguments.seed)
            rows += [measure(preset, case, model, arguments) for case in cases]
    harness.print_table(rows, COLUMNS)
    alone = [row for row in rows if row["case"] == "other core idle"]
    bars = [
        harness.wanted("coverage of the upper estimate", min(row["coverage"] for row in alone), 0.99),
        harness.wanted("upper over actual", max(row["upper_over_actual"] for row in alone), 1.3, at_most=True),
        harness.wanted("mean absolute error of long steps", max(row["mae_share"] for row in alone), 0.05, at_most=True),
    ]
    return harness.finish(arguments, "latency", rows, bars, begun)


if __name__ == "__main__":
    raise SystemExit(main())
