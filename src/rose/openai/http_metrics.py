"""Metrics of an HTTP server, under the names that vLLM gives them, so that its dashboards fit.

The engine's own counters are read from its newest facts at every scrape. Latencies are measured here, from the moment
a handler starts to the arrival of a token's step. That happens once per token of every request, so the children of
labelled metrics are looked up at the start and never again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Histogram

from rose.api.requests import EngineFacts, TokenEvent
from rose.observe.metrics import (
    FIRST_TOKEN_BUCKETS_S,
    REQUEST_BUCKETS_S,
    TOKEN_COUNT_BUCKETS,
    TOKEN_GAP_BUCKETS_S,
    Metrics,
    MirrorKind,
)

FINISHED_REASONS = ("stop", "length", "abort", "error")
LABEL = "model_name"


class EngineStep(Protocol):
    """One step of an engine. `started` names the requests that were waiting until this step."""

    @property
    def events(self) -> Sequence[TokenEvent]: ...
    @property
    def step_tokens(self) -> int: ...
    @property
    def step_s(self) -> float: ...
    @property
    def started(self) -> Sequence[str]: ...


@dataclass(slots=True)
class RequestTiming:
    """Times of one engine request, from its arrival."""

    arrival_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0


class HttpMetrics:
    """The metrics of one server. The counters in `facts` survive a restart of the engine."""

    def __init__(
        self,
        model_name: str,
        facts: Callable[[], EngineFacts],
        metrics: Metrics | None = None,
        *,
        is_live: bool = False,  # the size of the KV cache changes while the server runs
    ) -> None:
        self._metrics = metrics or Metrics()
        self._labels = {LABEL: model_name}
        self._timings: dict[str, RequestTiming] = {}
        mirror_facts(self._metrics, facts, self._labels)
        first = facts()
        self._metrics.info(
            "vllm:cache_config_info",
            "The KV cache as configured.",
            lambda: cache_labels(model_name, facts() if is_live else first),
        )
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
        self._timings[request_id] = RequestTiming(arrival_s)
        self._request_prompt.observe(prompt_tokens)

    def abandon(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        """Count requests that end without an event: cancelled, cut by a stop string, or lost with the engine."""
        now_s = time.monotonic()
        for request_id in request_ids:
            timing = self._timings.pop(request_id, None)
            if timing is not None:
                self._end(timing, reason, now_s)

    def observe(self, step: EngineStep) -> None:
        """Count one step of the engine, as it arrives."""
        now_s = time.monotonic()
        if step.step_tokens:
            self._step_tokens.observe(step.step_tokens)
            self._step_s.inc(step.step_s)
        for request_id in step.started:
            if request_id in self._timings:
                self._queued.observe(max(0.0, now_s - step.step_s - self._timings[request_id].arrival_s))
        for event in step.events if self._timings else ():  # an agent's turns are not timed here
            timing = self._timings.get(event.request_id)
            if timing is None:
                continue
            if event.token_ids:
                if timing.tokens:
                    self._token_gap.observe((now_s - timing.last_s) / len(event.token_ids))
                else:
                    timing.first_s = now_s
                    self._first_token.observe(now_s - timing.arrival_s)
                timing.last_s = now_s
                timing.tokens += len(event.token_ids)
            if event.finish_reason is not None:
                del self._timings[event.request_id]
                self._end(timing, event.finish_reason, now_s)

    def _end(self, timing: RequestTiming, reason: str, now_s: float) -> None:
        self._ended[reason].inc()
        self._whole.observe(now_s - timing.arrival_s)
        self._request_output.observe(timing.tokens)
        if timing.tokens > 1:
            self._mean_gap.observe((timing.last_s - timing.first_s) / (timing.tokens - 1))

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        what = name.replace("_", " ").capitalize() + "."
        return self._metrics.histogram(f"vllm:{name}", what, buckets, [LABEL]).labels(**self._labels)


def cache_labels(model_name: str, facts: EngineFacts) -> dict[str, str]:
    return {LABEL: model_name, "block_size": str(facts.block_tokens), "num_gpu_blocks": str(facts.kv_blocks_limit)}


def mirror_facts(metrics: Metrics, facts: Callable[[], EngineFacts], labels: dict[str, str]) -> None:
    """Show what the engine counts itself."""

    def figure(kind: MirrorKind, name: str, what: str, read: Callable[[EngineFacts], float]) -> None:
        metrics.mirror(kind, f"vllm:{name}", what, lambda: read(facts()), labels)

    figure("gauge", "num_requests_running", "Requests in the engine's batch.", lambda now: now.running)
    figure("gauge", "num_requests_waiting", "Requests that wait for a place.", lambda now: now.waiting)
    usage = "Share of the KV blocks that requests hold; 1 is all."
    figure("gauge", "kv_cache_usage_perc", usage, lambda now: now.kv_blocks_used / max(1, now.kv_blocks_limit))
    lookups = "Tokens looked up in the prefix cache."
    figure("counter", "prefix_cache_queries", lookups, lambda now: now.prefix_query_tokens)
    figure("counter", "prefix_cache_hits", "Tokens found in the prefix cache.", lambda now: now.prefix_hit_tokens)
    figure("counter", "num_preemptions", "Requests put back for lack of KV blocks.", lambda now: now.preemptions)
    figure("counter", "prompt_tokens", "Prompt tokens computed.", lambda now: now.prompt_tokens)
    figure("counter", "generation_tokens", "Tokens generated.", lambda now: now.generated_tokens)
