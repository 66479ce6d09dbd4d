"""The numbers a device shows, under the names that vLLM gives them, so that its dashboards fit.

What the engine counts is read from its newest facts when somebody looks. Latencies are measured here, from the moment
a handler starts to the arrival of a token's step: once per token of every request, so the children of labelled
metrics are looked up at the start and never again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import Histogram

from rose.coserve.messages import Stepped
from rose.engines.base import EngineFacts
from rose.observe.metrics import (
    FIRST_TOKEN_BUCKETS_S,
    REQUEST_BUCKETS_S,
    TOKEN_COUNT_BUCKETS,
    TOKEN_GAP_BUCKETS_S,
    Metrics,
)

FINISHED_REASONS = ("stop", "length", "abort", "error")
LABEL = "model_name"


@dataclass(slots=True)
class Timing:
    """One request of the engine, from its arrival."""

    arrival_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0


class FrontMetrics:
    """One per device. `facts` gives the newest facts with counters that survive a restart of the engine."""

    def __init__(self, model_name: str, facts: Callable[[], EngineFacts], metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._labels = {LABEL: model_name}
        self._timings: dict[str, Timing] = {}
        self._mirror_facts(facts)
        self._first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN_BUCKETS_S)
        self._token_gap = self._histogram("inter_token_latency_seconds", TOKEN_GAP_BUCKETS_S)
        self._mean_gap = self._histogram("request_time_per_output_token_seconds", TOKEN_GAP_BUCKETS_S)
        self._whole = self._histogram("e2e_request_latency_seconds", REQUEST_BUCKETS_S)
        self._queued = self._histogram("request_queue_time_seconds", REQUEST_BUCKETS_S)
        step_s = self._metrics.counter("rose_step_seconds", "Time spent in steps of this model.", [LABEL])
        self._step_s = step_s.labels(model_name)
        self._step_tokens = self._histogram("iteration_tokens_total", TOKEN_COUNT_BUCKETS)
        self._request_prompt = self._histogram("request_prompt_tokens", TOKEN_COUNT_BUCKETS)
        self._request_output = self._histogram("request_generation_tokens", TOKEN_COUNT_BUCKETS)
        success = self._metrics.counter("vllm:request_success", "Requests that ended.", [LABEL, "finished_reason"])
        self._ended = {reason: success.labels(model_name, reason) for reason in FINISHED_REASONS}

    def exposition(self) -> bytes:
        return self._metrics.exposition()

    def begin(self, request_id: str, arrival_s: float, prompt_tokens: int) -> None:
        self._timings[request_id] = Timing(arrival_s)
        self._request_prompt.observe(prompt_tokens)

    def abandon(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        """Requests that end without the engine's word: cancelled, cut by a stop string, or lost with the engine."""
        now_s = time.monotonic()
        for request_id in request_ids:
            timing = self._timings.pop(request_id, None)
            if timing is not None:
                self._end(timing, reason, now_s)

    def observe(self, stepped: Stepped) -> None:
        """Every step of the engine, as it arrives."""
        now_s = time.monotonic()
        if stepped.step_tokens:
            self._step_tokens.observe(stepped.step_tokens)
            self._step_s.inc(stepped.step_s)
        for request_id in stepped.started:
            if request_id in self._timings:
                self._queued.observe(max(0.0, now_s - stepped.step_s - self._timings[request_id].arrival_s))
        for event in stepped.events if self._timings else ():  # an agent's turns are not timed here
            timing = self._timings.get(event.request_id)
            if timing is None:
                continue
            if event.token_ids:
                self._observe_tokens(timing, len(event.token_ids), now_s)
            if event.finish_reason is not None:
                del self._timings[event.request_id]
                self._end(timing, event.finish_reason, now_s)

    def _observe_tokens(self, timing: Timing, count: int, now_s: float) -> None:
        if timing.tokens:
            self._token_gap.observe((now_s - timing.last_s) / count)
        else:
            timing.first_s = now_s
            self._first_token.observe(now_s - timing.arrival_s)
        timing.last_s = now_s
        timing.tokens += count

    def _end(self, timing: Timing, reason: str, now_s: float) -> None:
        self._ended[reason].inc()
        self._whole.observe(now_s - timing.arrival_s)
        self._request_output.observe(timing.tokens)
        if timing.tokens > 1:
            self._mean_gap.observe((timing.last_s - timing.first_s) / (timing.tokens - 1))

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        what = name.replace("_", " ").capitalize() + "."
        return self._metrics.histogram(f"vllm:{name}", what, buckets, [LABEL]).labels(**self._labels)

    def _mirror_facts(self, facts: Callable[[], EngineFacts]) -> None:
        mirror_facts(self._metrics, facts, self._labels)
        info = self._metrics.gauge(
            "vllm:cache_config_info", "The KV cache as configured.", [LABEL, "block_size", "num_gpu_blocks"]
        )
        now = facts()
        info.labels(self._labels[LABEL], str(now.block_tokens), str(now.kv_blocks_limit)).set(1)


Read = Callable[[EngineFacts], float]


def mirror_facts(metrics: Metrics, facts: Callable[[], EngineFacts], labels: dict[str, str]) -> None:
    """What the engine counts itself."""
    for name, what, read in _GAUGES:
        metrics.mirror("gauge", f"vllm:{name}", what, _reading(read, facts), labels)
    for name, what, read in _COUNTERS:
        metrics.mirror("counter", f"vllm:{name}", what, _reading(read, facts), labels)


def _reading(read: Read, facts: Callable[[], EngineFacts]) -> Callable[[], float]:
    return lambda: read(facts())


_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("num_requests_running", "Requests in the engine's batch.", lambda facts: facts.running),
    ("num_requests_waiting", "Requests that wait for a place.", lambda facts: facts.waiting),
    (
        "kv_cache_usage_perc",
        "Share of the KV blocks that requests hold; 1 is all.",
        lambda facts: facts.kv_blocks_used / max(1, facts.kv_blocks_limit),
    ),
)
_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda facts: facts.prefix_query_tokens),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda facts: facts.prefix_hit_tokens),
    ("num_preemptions", "Requests put back for lack of KV blocks.", lambda facts: facts.preemptions),
    ("prompt_tokens", "Prompt tokens computed.", lambda facts: facts.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda facts: facts.generated_tokens),
)
