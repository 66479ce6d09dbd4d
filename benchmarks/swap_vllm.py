"""How long a rollout engine on vLLM stands still for new weights, beside vLLM's own way, in one run.

    python benchmarks/swap_vllm.py --vllm-python .venv-vllm/bin/python --json FILE

    ours             staged while steps go on, then what differs is written by index, verified, and reported to vLLM
    patch_loader     vLLM's loader of sparse patches, with what changed ready in memory
    patch_loader_unchecked   the same without its search for indices that come twice

Two versions of one model that differ by one bit in 1 % of every tensor; each method takes the engine from one to the
other, in turn, while 8 turns decode. `pause_ms` is how long the engine stands still: from the end of its last step to
the gate being open again, which it notices within 4 ms. `write_ms` is the call that writes. All methods close the same
gate; only ours verifies and can take back. At the end an engine is started with the second version and must say the
same as the one that was swapped to it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import harness
import numpy as np

sys.path.insert(0, str(harness.PROJECT))
from tests.vllm import engines

from rose.engines.base import Request, Sampling
from rose.errors import RoseError
from rose.models.presets import write_preset
from rose.models.tensors import SINGLE, open_tensors, write_tensors
from rose.vllm.engine_process import EngineProcess, RolloutEngineSettings
from rose.vllm.vllm_engine import VllmEngine

METHODS = ("ours", "patch_loader", "patch_loader_unchecked")
COLUMNS = ("method", "numbers", "pause_ms", "pause_ms_low", "pause_ms_high", "write_ms", "stage_ms", "why")
ALL, TURNS, CHANGED_SHARE = 1 << 20, 8, 0.01
EXTENSION = ("--worker-extension-cls", "competitors.vllm_patches.PatchingWorker")


class Bench:
    """One engine that decodes all the time."""

    def __init__(self, worker: VllmEngine, folders: list[Path]) -> None:
        self.worker, self.folders = worker, folders
        self.turns = self.now = self.versions = 0

    async def keep(self) -> None:
        while True:
            self.worker.write_control(tokens=ALL, sequences=ALL, until_s=time.monotonic() + 5.0)
            await asyncio.sleep(1.0)

    async def roll(self, number: int) -> None:
        while True:
            self.turns += 1
            prompt = tuple((number * 7 + self.turns + place) % 250 for place in range(40))
            async for _ in self.worker.generate(_request(f"turn-{self.turns}", prompt, 200)):
                pass

    async def swap(self, method: str) -> dict[str, float]:
        """To the other version."""
        before, after = (str(self.folders[number]) for number in (self.now, 1 - self.now))
        self.now = 1 - self.now
        if method == "ours":
            return await self._ours(after)
        found = await self.worker._call_worker("prepare_patches", [before, after])
        is_checked = "no" if method.endswith("unchecked") else "yes"
        return {**await self._gated(self.worker._call_worker("load_patches", [is_checked])), **found}

    async def _ours(self, after: str) -> dict[str, float]:
        worker, write_ms = self.worker, 0.0
        self.versions += 1
        version, plain, began_s = f"version-{self.versions}", worker._call, time.monotonic()
        await worker.stage(version, after)
        stage_ms = (time.monotonic() - began_s) * 1e3
        numbers = (await worker._call_worker("staged_weights", []))["numbers"]

        async def timed(path: str, body: Any) -> Any:
            nonlocal write_ms
            begun_s = time.monotonic()
            found = await plain(path, body)
            write_ms += (time.monotonic() - begun_s) * 1e3 if path == "/update_weights" else 0.0
            return found

        worker._call = timed  # type: ignore[method-assign]
        await worker.commit(version)
        del worker._call
        assert worker.swap_s is not None
        return {"pause_ms": worker.swap_s * 1e3, "write_ms": write_ms, "stage_ms": stage_ms, "numbers": numbers}

    async def _gated(self, write: Awaitable[Any]) -> dict[str, float]:
        await self.worker._pause()
        begun_s = time.monotonic()
        await write
        written_s = time.monotonic()
        await self.worker._resume()
        assert self.worker.swap_s is not None
        return {"pause_ms": self.worker.swap_s * 1e3, "write_ms": (written_s - begun_s) * 1e3}


def _request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(name, prompt, Sampling(max_tokens=max_tokens, ignore_eos=True, temperature=0.0))


async def measure(engine: RolloutEngineSettings, folders: list[Path], repeats: int) -> tuple[list[dict[str, Any]], Any]:
    process = EngineProcess(engine)
    try:
        bench = Bench(await process.start(), folders)
        keeper = asyncio.create_task(bench.keep())
        turns = [asyncio.create_task(bench.roll(number)) for number in range(TURNS)]
        rows = await compare(bench, repeats)
        for _ in range(1 + bench.now):  # so that it ends with the second version
            await bench.swap("ours")
        for task in turns:
            task.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        said = await answer(bench.worker)
        keeper.cancel()
    finally:
        await process.close()
    return rows, said


async def compare(bench: Bench, repeats: int) -> list[dict[str, Any]]:
    """What a method of vLLM's cannot do is a row with its reason. The first round is not counted."""
    found: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    failed: dict[str, str] = {}
    for _ in range(1 + repeats):
        for method in METHODS:
            await asyncio.sleep(0.2)  # so that turns decode again
            try:
                if method not in failed:
                    found[method].append(await bench.swap(method))
            except RoseError as error:
                if method == "ours":
                    raise
                failed[method] = error.what
    return [row(method, found[method][1:]) | {"why": failed.get(method)} for method in METHODS]


def row(method: str, found: list[dict[str, float]]) -> dict[str, Any]:
    made: dict[str, Any] = {"method": method}
    for name in ("pause_ms", "write_ms", "stage_ms", "numbers"):
        if values := [one[name] for one in found if name in one]:
            harness.put_ratio(made, name, values)
    return made


async def answer(worker: VllmEngine) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    logprobs: list[float] = []
    while worker.status().running:
        await asyncio.sleep(0.01)
    async for event in worker.generate(_request("last", tuple(range(60)), 100)):
        tokens += event.token_ids
        logprobs += event.logprobs
    return tokens, logprobs


async def cold(engine: RolloutEngineSettings) -> tuple[list[int], list[float]]:
    """What an engine says that was started with these weights."""
    process = EngineProcess(engine)
    try:
        worker = await process.start()
        worker.write_control(tokens=ALL, sequences=ALL, until_s=time.monotonic() + 120.0)
        return await answer(worker)
    finally:
        await process.close()


def write_changed(before: Path, after: Path, seed: int) -> None:
    """The last bit of bf16 differs in 1 % of every tensor."""
    shutil.copytree(before, after)
    tensors, chance = open_tensors(before), np.random.default_rng(seed)
    changed = {}
    for name in tensors.names():
        bits = tensors.bits16(name).copy()
        index = chance.choice(bits.size, max(1, int(CHANGED_SHARE * bits.size)), replace=False)
        bits.reshape(-1)[index] ^= 1
        changed[name] = (bits.astype(np.uint32) << 16).view(np.float32)
    write_tensors(after / SINGLE, changed, "bf16", {"format": "pt"})


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--vllm-python", type=Path, default=Path(engines.PYTHON or ".venv-vllm/bin/python"))
    options.add_argument("--model", default="qwen3-25m")
    arguments = options.parse_args()
    begun, python = harness.machine(), str(arguments.vllm_python.absolute())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ROSE_BOARDS"] = str(Path(folder) / "boards")
        folders = [Path(folder) / name for name in ("before", "after")]
        write_preset(arguments.model, folders[0], seed=arguments.seed)
        write_changed(folders[0], folders[1], arguments.seed)
        paths = os.pathsep.join([engines.SOURCES, str(harness.PROJECT / "benchmarks")])
        own = {**engines.environment(), "PYTHONPATH": paths}
        engine = engines.rollout_engine(folders[0], python=python, extra=EXTENSION, environment=own)
        rows, swapped = asyncio.run(measure(engine, folders, 3 if arguments.quick else 15))
        started = asyncio.run(cold(engines.rollout_engine(folders[1], python=python)))
    difference = max(abs(one - other) for one, other in zip(swapped[1], started[1], strict=True))
    harness.print_table(rows, COLUMNS)
    bars = [
        harness.wanted("pause of ours, ms", rows[0]["pause_ms"], 100, at_most=True),
        harness.wanted("tokens as after a cold start", float(swapped[0] == started[0]), 1.0),
        harness.wanted("log-probabilities off by", difference, 1e-6, at_most=True),
    ]
    found = {"model": arguments.model, "changed_share": CHANGED_SHARE, "logprob_difference_max": difference}
    return harness.finish(arguments, "swap_vllm", rows, bars, begun, **found)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RoseError as error:
        sys.exit(str(error))
