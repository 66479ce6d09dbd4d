"""The step that swaps weights in a running engine, and compares with an engine that started with them.

The second version is the first with one bit of 5 % of its numbers flipped. The swapped engine must give the answer of
a fresh engine with the second version, and after a swap back its first answer. ROSE verifies every number by hash on
its way to a worker; here the two folders are told apart by the hash of their files.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rose.engines.base import Request, Sampling
from rose.models.tensors import SINGLE, open_tensors, write_tensors
from rose.verify.rollout_side import rollout_engine
from rose.verify.step_context import NotApplicable, StepContext
from rose.vllm.engine_process import EngineProcess
from rose.vllm.vllm_agent import ALL
from rose.vllm.vllm_engine import VllmEngine

CHANGED_SHARE, CHANGED_BIT = 0.05, 1 << 6  # of bf16: each changed number by a quarter to a half
PROMPT = [(11 * number) % 250 for number in range(60)]
TOKENS, LONG_TOKENS = 96, 600
BYTES_MAX = 4 << 30  # of a model that is copied, through twice as much memory of the host
HASH_PIECE_BYTES = 1 << 24
STARTED_S = 120.0
GRANT_S = 600.0  # longer than this step may take
POLL_S = 0.002


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 of a folder's weight files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while piece := file.read(HASH_PIECE_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def write_changed(before: Path, after: Path, seed: int) -> None:
    """Write a copy of a model in bf16 in which one bit of 5 % of each tensor differs."""
    shutil.rmtree(after, ignore_errors=True)
    ignore = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.gguf")
    shutil.copytree(before, after, ignore=ignore)
    tensors, random = open_tensors(before), np.random.default_rng(seed)
    changed = {}
    for name in tensors.names():
        bits = tensors.bits16(name).copy()
        places = random.choice(bits.size, max(1, int(CHANGED_SHARE * bits.size)), replace=False)
        bits.reshape(-1)[places] ^= CHANGED_BIT
        changed[name] = (bits.astype(np.uint32) << 16).view(np.float32)
    write_tensors(after / SINGLE, changed, "bf16", {"format": "pt"})


async def weight_swap(context: StepContext) -> None:
    """Swap a running engine to other weights in the middle of a turn, and back."""
    first = context.lab.rollout_model()
    size = sum(path.stat().st_size for path in first.glob("*.safetensors"))
    if size > BYTES_MAX or shutil.disk_usage(context.folder).free < 3 * size:
        raise NotApplicable(f"the model has {size / (1 << 30):.1f} GiB: too large to write a second version of it here")
    second = context.folder / "models" / "rollout-changed"
    context.say("writing a second version of the weights")
    await asyncio.to_thread(write_changed, first, second, context.settings.seed)
    hashes = [weights_hash(folder) for folder in (first, second)]
    context.findings.fact("weights of version 1, SHA-256", hashes[0])
    context.findings.fact("weights of version 2, SHA-256", hashes[1])
    try:
        await _swap_and_compare(context, first, second)
    finally:
        shutil.rmtree(second, ignore_errors=True)


class GreedyAnswer(NamedTuple):
    """The tokens of an answer and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]

    def agreement(self, other: GreedyAnswer) -> str:
        same = sum(a == b for a, b in zip(self.tokens, other.tokens))
        return f"{same} of {max(len(self.tokens), len(other.tokens))} tokens agree"


class SoloEngine:
    """A rollout engine that nothing gates, with one request at a time."""

    def __init__(self, context: StepContext, model: Path) -> None:
        self._process = EngineProcess(rollout_engine(context.settings, model, context.lab.time_slices))
        self.engine: VllmEngine
        self._number = 0

    async def __aenter__(self) -> SoloEngine:
        try:
            self.engine = await self._process.start()
        except BaseException:
            await self._process.close()
            raise
        self.engine.write_control(tokens=ALL, sequences=ALL, until_s=time.monotonic() + GRANT_S)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._process.close()

    async def answer(self, tokens: int, versions: list[str] | None = None) -> GreedyAnswer:
        """Return a greedy answer; add to `versions` each weight version when its first token comes."""
        self._number += 1
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        answer = GreedyAnswer([], [])
        async for event in self.engine.generate(Request(f"turn-{self._number}", tuple(PROMPT), sampling)):
            answer.tokens.extend(event.token_ids)
            answer.logprobs.extend(event.logprobs)
            if versions is not None and event.token_ids and event.version not in versions:
                versions.append(event.version)
        return answer

    async def swap(self, version: str, folder: Path) -> None:
        await self.engine.stage(version, str(folder))
        await self.engine.commit(version)


async def _swap_and_compare(context: StepContext, first: Path, second: Path) -> None:
    await context.lab.close_rollouts()
    context.say("swapping weights in a running engine")
    async with SoloEngine(context, first) as running:
        before = await running.answer(TOKENS)
        versions = await _swap_in_a_turn(running, second)
        pause_s = running.engine.swap_s
        swapped = await running.answer(TOKENS)
        await running.swap("version-1", first)
        back = await running.answer(TOKENS)
    context.say("starting an engine with the second version")
    async with SoloEngine(context, second) as fresh:
        started = await fresh.answer(TOKENS)
    check = context.findings.check
    context.findings.figure("standstill for a swap", None if pause_s is None else 1e3 * pause_s, "ms", 1)
    check("a turn under way has tokens of both versions", len(versions) == 2, ", ".join(versions))
    for name, one, other in (
        ("after the swap equal those of a fresh engine", swapped, started),
        ("after the swap back equal those before", back, before),
    ):
        check(f"greedy tokens {name}", one.tokens == other.tokens, one.agreement(other))
        difference = max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs)), default=None)
        context.findings.figure(f"log-probabilities {name}, but for", difference, "nats", len(one.logprobs))
    check("the two versions answer differently", before.tokens != swapped.tokens, before.agreement(swapped))


async def _swap_in_a_turn(running: SoloEngine, second: Path) -> list[str]:
    """Swap while a turn decodes; return the names of the versions whose tokens it has."""
    versions: list[str] = []
    await running.engine.stage("version-2", str(second))
    turn = asyncio.create_task(running.answer(LONG_TOKENS, versions))
    try:
        async with asyncio.timeout(STARTED_S):
            while not versions and not turn.done():
                await asyncio.sleep(POLL_S)
        await running.engine.commit("version-2")
        await turn
    finally:
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
    return [version or "the one that it started with" for version in versions]
