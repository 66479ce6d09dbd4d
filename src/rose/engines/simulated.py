"""An engine without arithmetic: real bookkeeping, made-up tokens, and time by a step profile.

`SimulatedEngine` batches, pages, caches, preempts, evicts and swaps with the scheduler of the embedded engine. A token
is a function of (seed, position in the sequence) only, so neither batch, place nor weights can change it; a step takes
no time, but says what it would have cost. Request lengths are forced with `ignore_eos`. `rose.sim` runs such engines in
virtual time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rose.engines.base import Budget, StepPlan, TokenEvent
from rose.engines.batch_scheduler import BatchingEngine, BatchScheduler, SchedulerLimits
from rose.engines.blocks import BlockPool
from rose.engines.live_request import LiveRequest, Sampled
from rose.engines.profiles import StepProfile
from rose.errors import ModelError

VOCABULARY = 151_936  # of the large models that the profiles stand for
LOGPROB_MIN = -4.0  # about what sampling at temperature 1 shows; nothing depends on it


class SimulatedEngine(BatchingEngine):
    """A `StepEngine` whose newest step would have taken `last_step_s`. A `pool` may share pages with other engines."""

    def __init__(
        self,
        profile: StepProfile,
        *,
        version: str = "0",
        kv_blocks: int | None = None,
        pool: BlockPool | None = None,
        max_step_tokens: int = 512,
        max_sequences: int = 64,
        max_waiting: int = 1024,
        spare_sequences: int = 0,
        vocabulary: int = VOCABULARY,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.profile = profile
        self.max_step_tokens = max_step_tokens
        limits = SchedulerLimits(
            block_tokens=profile.block_tokens,
            block_bytes=profile.block_bytes,
            max_context_tokens=profile.max_context_tokens,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            vocabulary=vocabulary,
            eos_token_ids=frozenset(eos_token_ids),
            spare_sequences=spare_sequences,
        )
        self.scheduler = BatchScheduler(limits, pool or BlockPool(kv_blocks or profile.kv_blocks), version)
        self.last_step_s = 0.0

    def plan(self, budget: Budget) -> StepPlan | None:
        return self.scheduler.plan(
            Budget(min(budget.tokens, self.max_step_tokens + self.scheduler.limits.spare_sequences), budget.sequences)
        )

    def cost_s(self, plan: StepPlan) -> float:
        return self.profile.step_s(plan.features)

    def step(self, plan: StepPlan) -> Sequence[TokenEvent]:
        pairs = zip(self.scheduler.begin(plan), plan.items, strict=True)
        self.last_step_s = self.cost_s(plan)
        for live, new in self.scheduler.planned:
            if live.scores_prompt:
                self._score(live, new)
        samples = {item.request_id: self._draw(live) for (live, _), item in pairs if item.samples}
        return self.scheduler.complete(plan, samples)

    def stage(self, version: str, source: Any) -> str:
        if not source:
            raise ModelError(f"there is no source for weights {version!r}", hint="name any folder; it is not read")
        return version

    def swap(self, staged: str) -> None:
        self.scheduler.swap(staged)

    def _score(self, live: LiveRequest, new_tokens: int) -> None:
        """Add made-up log-probabilities, a function of each token and its place."""
        del live.prompt_logprobs[live.computed :]
        top, vocabulary = live.request.sampling.prompt_logprobs or 0, self.scheduler.limits.vocabulary
        first = live.computed + 1
        for place, token_id in enumerate(live.token_ids[first : first + new_tokens], start=first):
            logprob = LOGPROB_MIN * (_mix(token_id, place) >> 11) / (1 << 53)
            best = tuple(((token_id + i) % vocabulary, logprob - i) for i in range(min(top, vocabulary)))
            live.prompt_logprobs.append((logprob, 1, best))

    def _draw(self, live: LiveRequest) -> Sampled:
        sampling = live.request.sampling
        chance = _mix(sampling.seed if sampling.temperature else 0, len(live.token_ids))
        vocabulary = self.scheduler.limits.vocabulary
        token_id, logprob = chance % vocabulary, LOGPROB_MIN * (chance >> 11) / (1 << 53)
        others = range(min(sampling.top_logprobs, vocabulary))
        return Sampled(token_id, logprob, tuple(((token_id + i) % vocabulary, logprob - i) for i in others))


def _mix(seed: int, position: int) -> int:
    """Return 64 well-mixed bits of two numbers: the finaliser of splitmix64, by Steele, Lea and Flood."""
    bits = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) % (1 << 64)
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return bits ^ (bits >> 31)
