"""What showing itself costs a serving engine on vLLM, per step, inside that engine: 64 requests decode and 64 wait.

    python benchmarks/publishing_vllm.py --vllm-python .venv-vllm/bin/python --json FILE

    decoding   nobody comes and nobody ends: most steps of a busy engine
    turnover   in nearly every step somebody ends, somebody else begins and a third one comes

A real engine runs in one process, so that the model's step has emptied the caches as it does in life. `scheduled_us` is
what was spent when a step was planned, `stepped_us` when its output was taken, `came_us` per arrival, `publish_us` the
first two together. Medians, and the ninth of ten as `_high`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

COLUMNS = ("case", "steps", "running", "waiting", "step_ms", "scheduled_us", "stepped_us", "publish_us",
           "publish_us_high", "came_us")  # fmt: skip
RUNNING = WAITING = 64
PROMPT_TOKENS = 40
WARM_STEPS = 4  # prompts, and the first step that only decodes
BAR_US = 50.0


class Times:
    """Of the calls of some methods of a class, in microseconds."""

    def __init__(self, owner: type, *names: str) -> None:
        self.us: dict[str, list[float]] = {name: [] for name in names}
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name), self.us[name]))

    @staticmethod
    def _timed(method: Callable[..., Any], kept: list[float]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            found = method(*arguments)
            kept.append((time.perf_counter() - began_s) * 1e6)
            return found

        return run

    def clear(self) -> None:
        for kept in self.us.values():
            kept.clear()


class Engine:
    """By the interpreter that has vLLM."""

    def __init__(self, model: str, seed: int) -> None:
        from vllm import LLM

        made = LLM(model, dtype="float32", max_model_len=1024, enforce_eager=True, seed=seed, max_num_seqs=RUNNING,
                   scheduler_cls="rose.vllm.ServingScheduler", kv_cache_memory_bytes=256 << 20,
                   block_size=32)  # fmt: skip
        self.engine, self.chance, self.asked = made.llm_engine, random.Random(seed), 0
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.times = Times(type(self.scheduler._rose), "on_arrival", "on_scheduled", "on_finished")

    def ask(self, max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        self.asked += 1
        prompt = TokensPrompt(prompt_token_ids=self.chance.choices(range(250), k=PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.engine.add_request(str(self.asked), prompt, sampling)

    def case(self, name: str, steps: int, lengths: tuple[int, int]) -> dict[str, Any]:
        self.fill(lengths)
        for _ in range(WARM_STEPS):
            self.engine.step()
        self.times.clear()
        began_s = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
            self.fill(lengths)
        seconds, us = time.perf_counter() - began_s, self.times.us
        both = [one + other for one, other in zip(us["on_scheduled"], us["on_finished"], strict=True)]
        held = {"running": len(self.scheduler.running), "waiting": len(self.scheduler.waiting)}
        found = {"case": name, "steps": steps, **held, "step_ms": round(seconds / steps * 1e3, 1)}
        return found | _figures({"scheduled_us": us["on_scheduled"], "stepped_us": us["on_finished"],
                                 "publish_us": both, "came_us": us["on_arrival"]})  # fmt: skip

    def drop_all(self) -> None:
        self.engine.abort_request([str(number + 1) for number in range(self.asked)])
        self.engine.step()

    def fill(self, lengths: tuple[int, int]) -> None:
        while len(self.scheduler.requests) < RUNNING + WAITING:
            self.ask(self.chance.randint(*lengths))


def _figures(measured: dict[str, list[float]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, values in measured.items():
        ordered = sorted(values)
        found[name] = round(ordered[len(ordered) // 2], 1) if ordered else None
        found[f"{name}_high"] = round(ordered[len(ordered) * 9 // 10], 1) if ordered else None
    return found


def inside(model: str, seed: int, steps: int) -> None:
    """The last line that is printed is the rows."""
    engine = Engine(model, seed)
    rows = [engine.case("decoding", steps, (900, 900))]
    engine.drop_all()
    rows.append(engine.case("turnover", steps, (16, 64)))
    print(json.dumps(rows))


def run_inside(python: str, model: Path, arguments: Any) -> list[dict[str, Any]]:
    steps = 150 if arguments.quick else 600
    command = [python, __file__, "--inside", str(model), str(arguments.seed), str(steps)]
    paths = os.pathsep.join([str(harness.PROJECT / "src"), str(harness.PROJECT / "benchmarks")])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
           "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "ROSE_BOARDS": str(model / "boards")}  # fmt: skip
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the engine failed:\n{done.stderr[-3000:]}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> int:
    from rose.models.presets import write_preset

    options = harness.parser(__doc__ or "")
    chosen = os.environ.get("ROSE_VLLM_PYTHON") or ".venv-vllm/bin/python"
    options.add_argument("--vllm-python", type=Path, default=Path(chosen))
    options.add_argument("--model", default="qwen3-3m")
    arguments = options.parse_args()
    begun = harness.machine()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_preset(arguments.model, model, seed=arguments.seed)
        rows = run_inside(str(arguments.vllm_python.absolute()), model, arguments)
    harness.print_table(rows, COLUMNS)
    bars = [
        harness.wanted(f"showing a step, {row['case']}, us", row["publish_us"], BAR_US, at_most=True) for row in rows
    ]
    return harness.finish(arguments, "publishing_vllm", rows, bars, begun, model=arguments.model)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
