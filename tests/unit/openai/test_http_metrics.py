"""Metrics under vLLM's names: requests timed from arrival, and the engine's own counters."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from rose.api.requests import EngineFacts, TokenEvent
from rose.observe.metrics import Metrics
from rose.openai.http_metrics import HttpMetrics

FACTS = EngineFacts("v0", 2, 3, 100, 25, 0, 16, 1024, 4096, prefix_query_tokens=9, generated_tokens=7)


@dataclass
class Step:
    events: tuple[TokenEvent, ...] = ()
    step_tokens: int = 0
    step_s: float = 0.0
    started: tuple[str, ...] = ()


def figures(metrics: HttpMetrics) -> dict[str, float]:
    lines = [line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")]
    return {
        name.replace('{model_name="m"}', ""): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)
    }


@pytest.fixture
def metrics() -> HttpMetrics:
    return HttpMetrics("m", lambda: FACTS, Metrics(process_facts=False))


def event(count: int, reason: str | None = None, name: str = "r") -> TokenEvent:
    return TokenEvent(name, (1,) * count, (-1.0,) * count, "v0", reason)  # type: ignore[arg-type]


def test_the_counters_of_the_engine_are_read_at_every_scrape() -> None:
    facts = [FACTS]
    metrics = HttpMetrics("m", lambda: facts[0], Metrics(process_facts=False))
    first = figures(metrics)
    assert (first["vllm:num_requests_running"], first["vllm:num_requests_waiting"]) == (2, 3)
    assert first["vllm:kv_cache_usage_perc"] == 0.25 and first["vllm:prefix_cache_queries_total"] == 9
    facts[0] = replace(FACTS, generated_tokens=70)
    assert figures(metrics)["vllm:generation_tokens_total"] == 70
    assert b'num_gpu_blocks="100"' in metrics.exposition()


def test_a_request_is_timed_from_its_arrival_to_its_last_token(metrics: HttpMetrics) -> None:
    metrics.begin("r", time.monotonic() - 2, 5)
    metrics.observe(Step((event(1),), 6, 0.5, ("r",)))
    metrics.observe(Step((event(2), event(1, "stop", "of another server")), 3, 0.25))
    metrics.observe(Step((event(1, "length"),), 1, 0.25))
    found = figures(metrics)
    assert found["vllm:request_prompt_tokens_sum"] == 5 and found["vllm:request_generation_tokens_sum"] == 4
    assert found["vllm:time_to_first_token_seconds_count"] == 1 and found["vllm:inter_token_latency_seconds_count"] == 2
    assert 2 <= found["vllm:time_to_first_token_seconds_sum"] <= found["vllm:e2e_request_latency_seconds_sum"] < 60
    assert 1.5 <= found["vllm:request_queue_time_seconds_sum"] < 60
    assert found["rose_step_seconds_total"] == 1 and found["vllm:iteration_tokens_total_sum"] == 10
    assert found['vllm:request_success_total{finished_reason="length",model_name="m"}'] == 1
    assert found['vllm:request_success_total{finished_reason="stop",model_name="m"}'] == 0


def test_a_cancelled_request_is_counted_once(metrics: HttpMetrics) -> None:
    metrics.begin("r", time.monotonic(), 1)
    metrics.abandon(["r", "unknown"])
    metrics.abandon(["r"], "error")
    metrics.observe(Step((event(1, "stop"),)))
    found = figures(metrics)
    assert found['vllm:request_success_total{finished_reason="abort",model_name="m"}'] == 1
    assert found['vllm:request_success_total{finished_reason="error",model_name="m"}'] == 0
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
