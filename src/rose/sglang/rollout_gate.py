"""Admission before every step of a rollout engine on SGLang, its counters and its status; knows SGLang by fields only.

The arbiter is the one of `rose.vllm`, which does not know an engine: it reads the agent's control and the serving
engine's status segment, and says how many tokens and sequences may run. SGLang plans prefill and decode steps apart. A
prefill is cut to the granted tokens. A decode step always has all running requests, so their number is kept within the
granted sequences: what is too much is retracted, which keeps its tokens, and computed again later. For a second after
that no more requests are begun, so that a grant that changes back and forth does not compute the same prompts again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rose.core.facts import RolloutView, StepFeatures
from rose.sglang.parked_sleep import ParkedSleep
from rose.vllm.control_segment import State, Status, open_control, open_status
from rose.vllm.vllm_arbiter import VllmArbiter

WAITING_SHOWN = 64
PUBLISH_S = 0.1  # a parked engine publishes its status no more often than this
ASK_S = 0.25  # with rollouts waiting or a dry run, even without events: grants begin and end by time too
OBSERVE_S = 0.5  # without any: serving's steps are learnt from all the same, and the segment keeps 512
CUT_HOLD_S = 1.0  # a few steps, and short beside a turn
COUNTERS = (
    "steps", "prompt_tokens", "generated_tokens", "prefix_query_tokens", "prefix_hit_tokens", "preemptions",
    "evictions", "evicted_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GateSizes:
    """The sizes of one engine; KV memory is counted in tokens."""

    step_tokens: int
    sequences: int
    kv_tokens: int
    token_bytes: int
    max_context_tokens: int


class RolloutGate:
    """The gate of one scheduler, in the scheduler's thread."""

    def __init__(self, folder: Path, sizes: GateSizes, sleep: ParkedSleep, version: Callable[[], str]) -> None:
        self.counts: dict[str, Any] = dict.fromkeys(COUNTERS, 0)
        self.live: dict[str, tuple[int, int]] = {}  # requests that began: tokens found in the prefix cache, produced
        self.is_open = False
        self.tokens = self.sequences = 0  # of the next step
        self._sizes, self._sleep, self._version = sizes, sleep, version
        self._arbiter = VllmArbiter(open_control(folder), step_tokens=sizes.step_tokens, sequences=sizes.sequences)
        self._status_segment = open_status(folder, create=True)
        self._status = Status(os.getpid())
        self._published_s = self._cut_s = 0.0
        self._cut_to = sizes.sequences
        self._view = RolloutView()
        sleep.watch(lambda: self._arbiter.wait_for_control(OBSERVE_S))
        sleep.watch(self._is_serving_due)

    def _is_serving_due(self) -> bool:
        is_eager = self._is_eager()
        return self._arbiter.wait_for_serving(ASK_S, is_eager=is_eager) and is_eager

    def _is_eager(self) -> bool:
        return self._arbiter.is_eager(has_work=self._view.decoding + self._view.prompt_tokens > 0)

    @property
    def is_unloaded(self) -> bool:
        """Return whether the agent has taken the KV memory: no request may stay."""
        return self._arbiter.control.kv_bytes == 0

    # Deciding

    def ask(self, view: RolloutView, now_s: float) -> None:
        """Decide on the next step."""
        self._view = view
        grant = self._arbiter.ask(view)
        self.is_open = grant.is_open(now_s) and not self.is_unloaded
        self.tokens, self.sequences = min(grant.tokens, self._sizes.step_tokens), grant.sequences

    def sequences_to_keep(self, running: int, now_s: float) -> int:
        """Return how many of the running requests may decode now, and remember a cut."""
        allowed = max(1, min(self.sequences, self.tokens, running))
        if allowed < running:
            self._cut_to, self._cut_s = allowed, now_s
        return allowed

    def sequences_to_begin(self, running: int, now_s: float) -> int:
        """Return how many more requests may begin now."""
        most = self._cut_to if now_s - self._cut_s < CUT_HOLD_S else self._sizes.sequences
        return max(0, min(most, self.sequences) - running)

    # Steps

    def on_step_began(self, features: StepFeatures, began_s: float) -> None:
        self._arbiter.on_step_began(features, began_s)

    def on_step_ended(self) -> None:
        self._arbiter.on_step_ended()
        self.counts["steps"] += 1

    # Parking

    def park(self, state: State, running: int, waiting: int, kv_used: int, kv_cached: int) -> None:
        """Publish that nothing runs, and sleep until that may change."""
        if state == "idle":
            self._arbiter.observe()
        self._arbiter.refit_if_due()
        is_news = state != self._status.state or self._arbiter.control_number != self._status.done
        if is_news or time.monotonic() - self._published_s > PUBLISH_S:  # the agent may wait for its control
            self.publish(state, running, waiting, kv_used, kv_cached)
        self._sleep.sleep(ASK_S if self._is_eager() else OBSERVE_S)

    def adopt_control(self) -> None:
        self._arbiter.adopt_control()

    # Status

    def publish(self, state: State, running: int, waiting: int, kv_used: int, kv_cached: int) -> None:
        """Write the status segment."""
        arbiter, now_s = self._arbiter, time.monotonic()
        self._published_s = now_s
        self._status = Status(
            os.getpid(),
            done=arbiter.control_number,
            at_s=now_s,
            state=state,
            gate_open=arbiter.last_grant.is_open(now_s),
            until_s=arbiter.last_grant.until_s,
            why=arbiter.last_grant.reason,
            version=self._version(),
            running=running,
            waiting=waiting,
            kv_blocks_limit=0 if self.is_unloaded else self._sizes.kv_tokens,
            kv_blocks_used=kv_used,
            kv_blocks_cached=kv_cached,
            block_tokens=1,
            block_bytes=self._sizes.token_bytes,
            max_context_tokens=self._sizes.max_context_tokens,
            live=self.live,
            lent=arbiter.account(),
            **self.counts,
        )
        self._status_segment.write(self._status)


def view_of(running: Iterable[Any], partly: Any, waiting: Iterable[Any]) -> RolloutView:
    """Return what could run now; `partly` is the request whose prompt is computed in parts, or None."""
    decoding = context = prompt = depth = 0
    for request in running:
        if request is partly or request.finished():
            continue
        decoding += 1
        context += tokens_of(request) - 1  # the newest is not computed
    if partly is not None:
        depth = partly.prefix_len
        prompt += max(1, tokens_of(partly) - depth)
    prompt += sum([tokens_of(request) for request in islice(waiting, WAITING_SHOWN)])
    return RolloutView(decoding, prompt, max(depth, context // decoding if decoding else 0))


def tokens_of(request: Any) -> int:
    """Return the tokens of prompt and answer so far."""
    return len(request.origin_input_ids) + len(request.output_ids)


def step_features(batch: Any) -> StepFeatures:
    """Return the shape of a batch that is about to run."""
    is_prefill = batch.forward_mode.is_extend()
    new = kv_read = new_by_context = 0
    for request in batch.reqs:
        context = request.prefix_len if is_prefill else tokens_of(request) - 1
        count = request.extend_end - context if is_prefill else 1
        new += count
        kv_read += context + count
        new_by_context += count * context + count * (count + 1) // 2
    return StepFeatures(new, kv_read, new_by_context, len(batch.reqs))


def kv_token_bytes(scheduler: Any) -> int:
    """Return the bytes of KV memory per token in all layers."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    return sum(int(size) for size in pool.get_kv_size_bytes()) // max(1, scheduler.max_total_num_tokens)
