"""The embedded engine: a `StepEngine` that runs on any Linux CPU, with no download.

It joins three independent parts: the scheduler decides which tokens a step computes, the runner computes their logits,
the sampler draws. Its results do not depend on batching, chunking, prefix hits, preemption or the number of cores, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rose.config.server_settings import EngineSettings, cores_of
from rose.engines.base import Budget, Request, StepPlan, TokenEvent
from rose.engines.batch_scheduler import BatchingEngine, BatchScheduler, SchedulerLimits
from rose.engines.embedded import engine_kernels as k
from rose.engines.embedded.engine_weights import PackedWeights, pack
from rose.engines.embedded.runner import SCORED_ROWS, KvMemory, Runner, block_bytes, own_memory
from rose.engines.embedded.sampler import Sampler
from rose.engines.live_request import LiveRequest
from rose.errors import ConfigError
from rose.models.model_folder import served_spec
from rose.models.model_spec import ModelSpec
from rose.models.tensors import Tensors, open_tensors

MIB = 1 << 20


class EmbeddedEngine(BatchingEngine):
    """A model on a set of cores."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        settings: EngineSettings,
        *,
        cores: Sequence[int],
        memory: KvMemory | None = None,
        spare_sequences: int = 0,
    ) -> None:
        self.spec = spec
        self.settings = settings
        context = min(spec.max_context_tokens, settings.max_context_tokens or spec.max_context_tokens)
        held = settings.kv_memory_mb * MIB // block_bytes(spec) * k.BLOCK_TOKENS
        if held < context:
            raise ConfigError(
                f"{settings.kv_memory_mb} MiB of KV memory hold {held} tokens of this model, "
                f"less than one context of {context}",
                hint="raise engine.kv_memory_mb or lower engine.max_context_tokens",
            )
        memory = memory or own_memory(spec, settings.kv_memory_mb * MIB)
        limits = SchedulerLimits(
            block_tokens=k.BLOCK_TOKENS,
            block_bytes=block_bytes(spec),
            max_context_tokens=context,
            max_sequences=settings.max_sequences,
            max_waiting=settings.max_waiting,
            vocabulary=spec.vocabulary,
            eos_token_ids=frozenset(spec.eos_token_ids),
            spare_sequences=spare_sequences,
        )
        self._sequences_max = sequences = settings.max_sequences + spare_sequences
        self.scheduler = BatchScheduler(limits, memory.pool, weights.version)
        self._kv = memory.floats
        self._kv_values = self._kv.reshape(memory.pool.capacity, spec.layers, 2, -1)[:, :, 1]
        self._block_table = np.zeros((sequences, -(-context // k.BLOCK_TOKENS)), np.int32)
        self._runner = Runner(
            spec,
            weights,
            cores,
            max_rows=settings.max_step_tokens + spare_sequences,
            max_context=context,
            max_samples=sequences,
        )
        self._sampler = Sampler(spec.vocabulary, int(weights.shape[k.VOCABULARY]), sequences, spec.eos_token_ids)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        settings: EngineSettings | None = None,
        *,
        device: str = "cpu:0",
        version: str = "0",
        memory: KvMemory | None = None,
        spare_sequences: int = 0,
    ) -> EmbeddedEngine:
        """Load a Hugging Face folder. Raises ModelError or ConfigError."""
        spec = served_spec(Path(folder))
        weights = pack(spec, open_tensors(folder), version)
        engine = cls(
            spec,
            weights,
            settings or EngineSettings(),
            cores=cores_of(device),
            memory=memory,
            spare_sequences=spare_sequences,
        )
        engine._warm_up()
        return engine

    def plan(self, budget: Budget) -> StepPlan | None:
        tokens = min(budget.tokens, self.settings.max_step_tokens + self.scheduler.limits.spare_sequences)
        return self.scheduler.plan(Budget(tokens, min(budget.sequences, self._sequences_max)))

    def step(self, plan: StepPlan) -> list[TokenEvent]:
        planned = self.scheduler.begin(plan)
        if not planned:
            return self.scheduler.complete(plan, {})
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
        for (live, new), first in zip(planned, segments[:, 0].tolist(), strict=True):
            if live.scores_prompt:
                self._score(live, first, new)
        return self.scheduler.complete(plan, self._sampler.draw(sampled, logits))

    def _score(self, live: LiveRequest, first_row: int, rows: int) -> None:
        """Add the log-probabilities of the prompt's tokens that follow these rows of the step."""
        del live.prompt_logprobs[live.computed :]  # computed before a preemption
        following = live.token_ids[live.computed + 1 : live.computed + rows + 1]
        top = live.request.sampling.prompt_logprobs or 0
        for start in range(0, len(following), SCORED_ROWS):
            tokens = following[start : start + SCORED_ROWS]
            logits = self._runner.logits_from(first_row + start, len(tokens))
            live.prompt_logprobs += self._sampler.score(tokens, logits, top)

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
        assert not self.scheduler.has_work(), "requests still need the weights"
        self._runner.weights = self._runner.weights.emptied()

    def close(self) -> None:
        self._runner.close()

    def _warm_up(self) -> None:
        # Compile (or load what an earlier start compiled) now, rather than during the first request.
        rows, segment = np.zeros(1, np.int64), np.array([[0, 1, 0, 0]], np.int64)
        one_block = np.zeros(block_bytes(self.spec) // 4, np.float32)
        logits = self._runner.run(rows, segment, self._block_table, one_block, rows)
        self._sampler.draw([LiveRequest(Request("", (0,)), 0, [0], [], [])], logits)
        self._sampler.score([0], self._runner.logits_from(0, 1), 1)

    def _prepare_blocks(self, live: LiveRequest) -> None:
        """Enter new and moved blocks in the table; the values of new ones must be zero (see the kernels)."""
        fresh = live.blocks[live.prepared_blocks :]
        if live.prepared_blocks and not fresh and not live.has_moved:
            return
        for block in fresh:
            self._kv_values[block] = 0.0
        self._block_table[live.slot, : len(live.blocks)] = live.blocks
        live.prepared_blocks, live.has_moved = len(live.blocks), False
