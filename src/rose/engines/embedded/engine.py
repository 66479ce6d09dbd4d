"""The embedded engine: a StepEngine that runs on any Linux CPU, with no download.

It joins three parts that know nothing of each other: the scheduler decides which tokens a step computes, the
runner computes their logits, the sampler draws. Its results do not depend on batching, chunking, prefix hits,
preemption or the number of cores, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rose.config.device import EngineSettings, cores_of
from rose.engines.base import Budget, EngineFacts, Partial, Request, StepPlan, TokenEvent
from rose.engines.embedded import kernels as k
from rose.engines.embedded.memory import KvMemory, block_bytes, own_memory
from rose.engines.embedded.runner import Runner
from rose.engines.embedded.sampler import Sampler
from rose.engines.embedded.weights import PackedWeights, pack
from rose.engines.scheduler import BatchScheduler, Limits, LiveRequest
from rose.errors import ConfigError
from rose.models.folder import served_spec
from rose.models.spec import ModelSpec
from rose.models.tensors import Tensors, open_tensors

MIB = 1 << 20


class EmbeddedEngine:
    """One model on one core set."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        settings: EngineSettings,
        *,
        cores: Sequence[int],
        memory: KvMemory | None = None,
    ) -> None:
        self.spec = spec
        self.settings = settings
        context = _context_tokens(spec, settings)
        memory = memory or own_memory(spec, settings.kv_memory_mb * MIB)
        limits = Limits(
            block_tokens=k.BLOCK_TOKENS,
            block_bytes=block_bytes(spec),
            max_context_tokens=context,
            max_sequences=settings.max_sequences,
            max_waiting=settings.max_waiting,
            vocabulary=spec.vocabulary,
            eos_token_ids=frozenset(spec.eos_token_ids),
        )
        self.scheduler = BatchScheduler(limits, memory.pool, weights.version)
        self._kv = memory.floats
        self._kv_values = self._kv.reshape(memory.pool.capacity, spec.layers, 2, -1)[:, :, 1]
        self._block_table = np.zeros((settings.max_sequences, -(-context // k.BLOCK_TOKENS)), np.int32)
        self._runner = Runner(
            spec,
            weights,
            cores,
            max_rows=settings.max_step_tokens,
            max_context=context,
            max_samples=settings.max_sequences,
        )
        self._sampler = Sampler(
            spec.vocabulary, int(weights.shape[k.VOCABULARY]), settings.max_sequences, spec.eos_token_ids
        )

    @classmethod
    def load(
        cls,
        folder: Path | str,
        settings: EngineSettings | None = None,
        *,
        device: str = "cpu:0",
        version: str = "0",
        memory: KvMemory | None = None,
    ) -> EmbeddedEngine:
        """Load a Hugging Face folder. Raises ModelError or ConfigError."""
        spec = served_spec(Path(folder))
        weights = pack(spec, open_tensors(folder), version)
        engine = cls(spec, weights, settings or EngineSettings(), cores=cores_of(device), memory=memory)
        engine._warm_up()
        return engine

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    def evict(self, request_id: str) -> Partial:
        return self.scheduler.evict(request_id)

    def plan(self, budget: Budget) -> StepPlan | None:
        tokens = min(budget.tokens, self.settings.max_step_tokens)
        return self.scheduler.plan(Budget(tokens, min(budget.sequences, self.settings.max_sequences)))

    def step(self, plan: StepPlan) -> list[TokenEvent]:
        planned = self.scheduler.begin(plan)
        if not planned:
            return self.scheduler.complete(plan, {})
        logits, sampled = self._compute(planned)
        return self.scheduler.complete(plan, self._sampler.draw(sampled, logits))

    def stage(self, version: str, source: Tensors | Path | str) -> PackedWeights:
        """Pack weights of the same model, from a folder or from memory, beside the running ones."""
        tensors: Any = open_tensors(source) if isinstance(source, Path | str) else source
        return pack(self.spec, tensors, version)

    def swap(self, staged: PackedWeights) -> None:
        self._runner.weights = staged
        self.scheduler.swap(staged.version)

    @property
    def weights_bytes(self) -> int:
        return self._runner.weights.nbytes

    def release_weights(self) -> None:
        """Forget the weights; nothing may be planned until `swap` brings some."""
        assert not self.scheduler.has_work(), "requests that need the weights"
        self._runner.weights = self._runner.weights.emptied()

    def limit_kv(self, blocks: int) -> list[TokenEvent]:
        return self.scheduler.limit_kv(blocks)

    def facts(self) -> EngineFacts:
        return self.scheduler.facts()

    def close(self) -> None:
        self._runner.close()

    def _warm_up(self) -> None:
        """Compile (or load what an earlier start compiled) now, rather than under the first request."""
        rows, segment = np.zeros(1, np.int64), np.array([[0, 1, 0, 0]], np.int64)
        one_block = np.zeros(block_bytes(self.spec) // 4, np.float32)
        logits = self._runner.run(rows, segment, self._block_table, one_block, rows)
        self._sampler.draw([LiveRequest(Request("", (0,)), 0, [0], [], [])], logits)

    def _compute(self, planned: Sequence[tuple[LiveRequest, int]]) -> tuple[Any, list[LiveRequest]]:
        ids: list[int] = []
        segments = np.empty((len(planned), 4), np.int64)
        sampled_rows, sampled = [], []
        for index, (live, new) in enumerate(planned):
            self._prepare_blocks(live)
            segments[index] = (len(ids), new, live.computed, live.slot)
            end = live.computed + new
            ids.extend(live.token_ids[live.computed : end])
            if end == len(live.token_ids):
                sampled_rows.append(len(ids) - 1)
                sampled.append(live)
        rows = np.array(sampled_rows, np.int64)
        logits = self._runner.run(np.array(ids, np.int64), segments, self._block_table, self._kv, rows)
        return logits, sampled

    def _prepare_blocks(self, live: LiveRequest) -> None:
        """Enter new blocks in the table, and those that moved; the values of new ones must be zero (see kernels)."""
        fresh = live.blocks[live.prepared_blocks :]
        if live.prepared_blocks and not fresh and not live.has_moved:
            return
        for block in fresh:
            self._kv_values[block] = 0.0
        self._block_table[live.slot, : len(live.blocks)] = live.blocks
        live.prepared_blocks, live.has_moved = len(live.blocks), False


def _context_tokens(spec: ModelSpec, settings: EngineSettings) -> int:
    """The context served; KV memory must hold at least one request of that length."""
    wanted = min(spec.max_context_tokens, settings.max_context_tokens or spec.max_context_tokens)
    held = settings.kv_memory_mb * MIB // block_bytes(spec) * k.BLOCK_TOKENS
    if held < wanted:
        raise ConfigError(
            f"{settings.kv_memory_mb} MiB of KV memory hold {held} tokens of this model, "
            f"less than one context of {wanted}",
            hint="raise engine.kv_memory_mb or lower engine.max_context_tokens",
        )
    return wanted
