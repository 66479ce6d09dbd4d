"""Measures what a step of the embedded engine costs on one core, and fits the `cpu` profiles of the simulated engine.

Batches of many sizes are prefilled in chunks and then decode, at many context lengths; every step is timed, planning
included, and every run is repeated with other prompts, so that nothing is found in the prefix cache. Steps of one shape
count once, with their median. The constants are those that keep relative errors small, found by iterated least squares
in which outliers weigh less and decoding as a whole as much as prompts; none may be negative.

    python benchmarks/profile_cpu.py                  all presets, shows the fit
    python benchmarks/profile_cpu.py --write          and writes the profiles that ship with ROSE
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
import numpy as np
from numpy.typing import NDArray

from rose.config.server_settings import EngineSettings
from rose.core.facts import StepFeatures
from rose.engines.base import Budget, Request, Sampling
from rose.engines.embedded.engine import EmbeddedEngine
from rose.engines.profiles import FOLDER, StepProfile, write_profile
from rose.models.presets import write_preset

NAMES = {"qwen3-3m": "cpu", "qwen3-25m": "cpu-qwen3-25m", "frozenlake-1m": "cpu-frozenlake-1m"}
CONSTANTS = ("fixed_s", "per_new_token_s", "per_kv_read_token_s", "per_new_by_context_s", "per_sequence_s")
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CONTEXTS = (16, 64, 256, 1024, 3072)
CHUNKS = (16, 64, 192, 512)
TOKENS_MAX = 8192  # of one batch; more would only take longer
HUBER = 0.1  # relative errors beyond this weigh less: most are another process on the machine

ERROR_MAX = 0.15  # of the median; runs on a lightly shared machine came to 4-9 %, on a busy one to 46 %
DECODE_GROUPS = (1, 4, 16, 64)  # batches up to this are shown together

Shape = tuple[int, int]  # batch, context
Timed = list[tuple[StepFeatures, float]]
Samples = Mapping[StepFeatures, float]


def shapes(quick: bool) -> Iterator[Shape]:
    for batch in BATCHES[:: 2 if quick else 1]:
        for context in CONTEXTS[:: 2 if quick else 1]:
            if batch * context <= TOKENS_MAX:
                yield batch, context


def measure(engine: EmbeddedEngine, shape: Shape, chunk: int, seed: int, steps: int) -> Timed:
    """Prefill a batch in chunks, decode it for so many steps, and time every step."""
    batch, context = shape
    chance = random.Random(f"{seed}/{shape}/{chunk}")
    for number in range(batch):
        prompt = tuple(chance.choices(range(90), k=context))
        engine.add(Request(f"r{number}", prompt, Sampling(max_tokens=steps, ignore_eos=True, seed=number)))
    found: Timed = []
    while True:
        started_s = time.perf_counter()
        plan = engine.plan(Budget(max(chunk, batch), batch))
        if plan is None:
            return found
        engine.step(plan)
        found.append((plan.features, time.perf_counter() - started_s))


def measure_all(engine: EmbeddedEngine, arguments: Any) -> Samples:
    seconds: dict[StepFeatures, list[float]] = defaultdict(list)
    steps = 8 if arguments.quick else 16
    for repeat in range(-1, 3 if arguments.quick else 5):
        for index, shape in enumerate(shapes(arguments.quick)):
            chunk = CHUNKS[index % len(CHUNKS)]
            for features, taken_s in measure(engine, shape, chunk, arguments.seed + repeat, steps):
                if repeat >= 0:  # the first round warms caches
                    seconds[features].append(taken_s)
        print(f"\rround {repeat + 1}", end="", flush=True)
    print()
    return {features: statistics.median(taken) for features, taken in seconds.items()}


def columns(shapes_run: Iterable[StepFeatures]) -> NDArray[np.float64]:
    return np.array([(1, f.new_tokens, f.kv_read_tokens, f.new_by_context, f.sequences) for f in shapes_run], float)


def fit(samples: Samples) -> NDArray[np.float64]:
    """Constants for 1, new_tokens, kv_read_tokens, new_by_context and sequences."""
    relative = columns(samples) / np.array(list(samples.values()))[:, None]
    decodes = np.array([is_decode(features) for features in samples])
    shares = np.sqrt(np.where(decodes, 1 / max(1, decodes.sum()), 1 / max(1, (~decodes).sum())))
    weights = shares
    for _ in range(50):
        constants = _without_negatives(relative * weights[:, None], weights)
        errors = np.abs(relative @ constants - 1)
        weights = shares * np.sqrt(np.minimum(1.0, HUBER / np.maximum(errors, 1e-9)))
    return constants


def is_decode(features: StepFeatures) -> bool:
    return features.new_tokens == features.sequences


def _without_negatives(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares; a constant that comes out negative is taken as zero and the rest is solved again."""
    scale = np.linalg.norm(matrix, axis=0)
    used = np.ones(matrix.shape[1], bool)
    while True:
        solved = np.zeros(matrix.shape[1])
        solved[used] = np.linalg.lstsq(matrix[:, used] / scale[used], target, rcond=None)[0] / scale[used]
        if (solved >= 0).all():
            return solved
        used[np.argmin(solved * scale)] = False


def profile_of(preset: str, engine: EmbeddedEngine, constants: NDArray[np.float64], fitted: str) -> StepProfile:
    facts = engine.facts()
    return StepProfile(
        name=NAMES[preset],
        what=f"preset {preset} on one core by the embedded engine, measured",
        shape="sum",
        **{name: float(f"{constant:.5g}") for name, constant in zip(CONSTANTS, constants)},
        kv_bytes_per_token=facts.block_bytes // facts.block_tokens,
        kv_memory_bytes=EngineSettings().kv_memory_mb << 20,
        block_tokens=facts.block_tokens,
        max_context_tokens=facts.max_context_tokens,
        source={
            "method": "benchmarks/profile_cpu.py: robust least squares on relative errors over timed steps, "
            "planning included; compute and memory are not told apart, so weights_read_s is in fixed_s",
            "measured": fitted,
            "kv_memory_bytes": "the default of engine.kv_memory_mb",
            "model": f"preset {preset}, fp32 arithmetic over bf16-valued weights",
        },
    )


def profile_preset(preset: str, folder: Path, arguments: Any, begun: dict[str, Any]) -> list[dict[str, Any]]:
    settings = EngineSettings(max_step_tokens=512, max_sequences=64)
    engine = EmbeddedEngine.load(folder, settings, device=f"cpu:{arguments.core}")
    samples = measure_all(engine, arguments)
    constants = fit(samples)
    errors = np.abs(columns(samples) @ constants / np.array(list(samples.values())) - 1)
    middle, most = np.median(errors), np.quantile(errors, 0.9)
    where = f"one core of {begun['cpu']} ({begun['cores']} cores, load {begun['load_before']} before)"
    fitted = f"{len(samples)} step shapes on {where}; off by {middle:.1%} (median), {most:.1%} (P90)"
    profile = profile_of(preset, engine, constants, fitted)
    print(f"{profile.name}: {fitted}")
    if arguments.write and middle <= ERROR_MAX:
        write_profile(profile, FOLDER / f"{profile.name}.json")
    elif arguments.write:
        print(f"{profile.name}: not written, the fit is too far off; try again on a quieter machine")
    row = {"model": preset, "profile": profile.name, "error_median": float(middle), "error_p90": float(most)}
    row |= {name: getattr(profile, name) for name in CONSTANTS}
    return [row, *_groups(preset, profile, samples)]


def _groups(preset: str, profile: StepProfile, samples: Samples) -> Iterator[dict[str, Any]]:
    """How well the fit holds for decoding by batch, and for prompts."""
    groups: dict[str, Timed] = {f"decode, batch <= {batch}": [] for batch in DECODE_GROUPS} | {"prompt chunks": []}
    for features, seconds in samples.items():
        batch = next(batch for batch in DECODE_GROUPS if features.sequences <= batch)
        groups[f"decode, batch <= {batch}" if is_decode(features) else "prompt chunks"].append((features, seconds))
    for case, found in groups.items():
        errors = [profile.step_s(features) / seconds - 1 for features, seconds in found]
        yield {
            "model": preset,
            "case": case,
            "shapes": len(found),
            "step_ms": 1000 * statistics.median(seconds for _, seconds in found),
            "bias": statistics.median(errors),
            "error_median": statistics.median(map(abs, errors)),
        }


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--preset", action="append", choices=NAMES, help="only this one; may be repeated")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--write", action="store_true", help="write the profiles into the package")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, [arguments.core])
    begun, rows = harness.machine(), []
    with tempfile.TemporaryDirectory() as folder:
        for preset in arguments.preset or NAMES:
            model = write_preset(preset, Path(folder) / preset, seed=arguments.seed)
            rows += profile_preset(preset, model, arguments, begun)
    harness.print_table([row for row in rows if "profile" in row], ("profile", "error_median", "error_p90", *CONSTANTS))
    print()
    harness.print_table(rows, ("model", "case", "shapes", "step_ms", "bias", "error_median", "error_p90"))
    worst = max(row["error_median"] for row in rows if "profile" in row)
    bars = [harness.wanted("median error of a fit", worst, ERROR_MAX, at_most=True)]
    return harness.finish(arguments, "profile_cpu", rows, bars, begun)


if __name__ == "__main__":
    raise SystemExit(main())
