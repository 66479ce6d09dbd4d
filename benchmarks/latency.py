"""How well the latency model foretells steps of the embedded engine: coverage of its upper estimate, and its errors.

A model is profiled as a device does at its start, and then meets random mixes: 1 to 64 requests, short and long
prompts, whole and partial steps, each mix for about a second. It is asked before every step and told after it. Keys:
`coverage` (share of steps at or under the upper estimate), `upper_over_actual` (mean over steps), `upper_by_time` (all
upper estimates over all actual time), `mae_share` (mean absolute error over the actual time, for steps of 5 ms and
more). A second table has the same by kind and length of step.

What the machine itself leaves open is measured with fixed computations in the same minute. `floor_mae_share` is the
error for one of about 5 ms, foretold by the best of several running means; `floor_upper` is, for one as long as the
median step, the mean of its own 99 % quantile over its actual times, which no estimate without foresight is far under.

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
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import numpy as np

from rose.config.server_settings import EngineSettings
from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel
from rose.device.coserving_factory import profile
from rose.engines.base import Budget, Request, Sampling, StepPlan
from rose.engines.embedded.engine import EmbeddedEngine
from rose.models.presets import write_preset

PRESETS = ("qwen3-3m", "frozenlake-1m")
LONG_S = 0.005
WARM_S = 3.0  # of mixes that are learnt from but not counted: memory is touched for the first time
FLOOR_S = 5.0
WIDE = Budget(512, 64)
COLUMNS = (
    "model", "case", "steps", "coverage", "upper_over_actual", "floor_upper", "upper_by_time", "mae_share",
    "floor_mae_share", "profile_s",
)  # fmt: skip
KIND_COLUMNS = ("model", "case", "kind", "length", "steps", "coverage", "upper_over_actual", "mae_share")
LENGTHS_MS = (0.0, 0.5, 2.0, 5.0, math.inf)
KIND_STEPS_MIN = 50
PRODUCTS_LONG = 40  # of the fixed computation: about 5 ms
Rows = np.ndarray[Any, Any]


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


def kind_of(features: StepFeatures) -> str:
    if features.new_tokens == features.sequences:
        return "decode of 1-7" if features.sequences < 8 else "decode of 8-64"
    return "prompt" if features.sequences == 1 else "mixed"


def run(engine: EmbeddedEngine, model: LatencyModel, seconds: float, seed: int) -> tuple[Rows, list[str]]:
    """(predicted, upper, actual) of every step after the warm-up, and their kinds."""
    mixes, begun_s, rows, kinds = Mixes(engine, seed), time.perf_counter(), [], []
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
            kinds.append(kind_of(features))
    return np.array(rows), kinds


def fixed_computation(products: int) -> list[float]:
    """How long the same work takes, again and again."""
    left, right = np.ones((96, 256), np.float32), np.ones((256, 256), np.float32)
    taken, begun_s = [], time.perf_counter()
    while time.perf_counter() - begun_s < FLOOR_S:
        begin_s = time.perf_counter()
        for _ in range(products):
            left @ right
        taken.append(time.perf_counter() - begin_s)
    return taken


def floors(median_step_s: float) -> dict[str, float]:
    """What is left open when nothing about the work changes."""
    long = fixed_computation(PRODUCTS_LONG)
    products = max(1, round(PRODUCTS_LONG * median_step_s / float(np.median(long))))
    short = np.array(fixed_computation(products))
    mae = min(_mae_of_running_mean(long, rate) for rate in (0.05, 0.1, 0.2, 0.4, 0.8))
    upper = float((np.quantile(short, 0.99) / short).mean())
    return {"floor_mae_share": round(mae, 4), "floor_upper": round(upper, 3)}


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


def figures(found: Rows) -> dict[str, Any]:
    predicted, upper, actual = found.T
    is_long = actual >= LONG_S
    error = np.abs(predicted - actual)[is_long] / actual[is_long]
    return {
        "steps": len(found),
        "coverage": round(float((actual <= upper).mean()), 4),
        "upper_over_actual": round(float((upper / actual).mean()), 3),
        "upper_by_time": round(float(upper.sum() / actual.sum()), 3),
        "mae_share": round(float(error.mean()), 4) if is_long.any() else None,
    }


def by_kind(found: Rows, kinds: list[str]) -> list[dict[str, Any]]:
    """Kinds and lengths with too few steps to say anything are left out."""
    names, rows = np.array(kinds), []
    for kind in sorted(set(kinds)):
        for low, high in pairwise(LENGTHS_MS):
            chosen = found[(names == kind) & (found[:, 2] >= low / 1e3) & (found[:, 2] < high / 1e3)]
            if len(chosen) >= KIND_STEPS_MIN:
                rows.append({"kind": kind, "length": f"{low:g} to {high:g} ms", **figures(chosen)})
    return rows


def measure(preset: str, case: str, folder: Path, arguments: Any) -> dict[str, Any]:
    settings = EngineSettings(max_step_tokens=WIDE.tokens, max_sequences=WIDE.sequences, kv_memory_mb=96)
    engine = EmbeddedEngine.load(folder, settings, device=f"cpu:{arguments.core}")
    gc.collect()
    gc.freeze()
    model, begun_s = LatencyModel(), time.perf_counter()
    profile(engine, model, WIDE.tokens)
    profile_s = time.perf_counter() - begun_s
    with busy(arguments.other_core if case == "other core busy" else None):
        found, kinds = run(engine, model, 20.0 if arguments.quick else 60.0, arguments.seed)
        floor = floors(float(np.median(found[:, 2])))
    engine.close()
    name = {"model": preset, "case": case}
    kind_rows = [{**name, **row} for row in by_kind(found, kinds)]
    return {**name, **figures(found), **floor, "profile_s": round(profile_s, 1), "kinds": kind_rows}


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
    print()
    harness.print_table([kind for row in rows for kind in row["kinds"]], KIND_COLUMNS)
    alone = [row for row in rows if row["case"] == "other core idle"]
    bars = [
        harness.wanted("coverage of the upper estimate", min(row["coverage"] for row in alone), 0.99),
        harness.wanted("upper over actual", max(row["upper_over_actual"] for row in alone), 1.3, at_most=True),
        harness.wanted("mean absolute error of long steps", max(row["mae_share"] for row in alone), 0.05, at_most=True),
    ]
    return harness.finish(arguments, "latency", rows, bars, begun)


if __name__ == "__main__":
    raise SystemExit(main())
