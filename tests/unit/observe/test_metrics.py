"""Metrics live in a registry of their own, and what is counted elsewhere is mirrored, not counted twice."""

from __future__ import annotations

import pytest

from rose.observe import metrics as m


def test_each_process_has_its_own_registry():
    first, second = m.Metrics(process_facts=False), m.Metrics(process_facts=False)
    first.counter("rose_turns_total", "turns").inc()
    second.counter("rose_turns_total", "turns")
    assert b"rose_turns_total 1.0" in first.exposition()
    assert b"rose_turns_total 0.0" in second.exposition()


def test_a_mirrored_number_is_read_at_every_scrape():
    metrics, kept = m.Metrics(process_facts=False), {"tokens": 3.0, "running": 2.0}
    metrics.mirror("counter", "vllm:prompt_tokens_total", "tokens", lambda: kept["tokens"], {"model_name": "a"})
    metrics.mirror("gauge", "vllm:num_requests_running", "running", lambda: kept["running"])
    assert b'vllm:prompt_tokens_total{model_name="a"} 3.0' in metrics.exposition()
    kept["tokens"] = 5.0
    assert b'vllm:prompt_tokens_total{model_name="a"} 5.0' in metrics.exposition()
    assert b"\nvllm:num_requests_running 2.0" in metrics.exposition()


def test_a_number_that_is_not_known_is_left_out():
    metrics = m.Metrics(process_facts=False)
    metrics.mirror("gauge", "rose_unknown", "nobody knows", lambda: None)
    assert metrics.exposition() == b""


def test_a_name_is_taken_once():
    metrics = m.Metrics(process_facts=False)
    metrics.gauge("rose_once", "once")
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.mirror("gauge", "rose_once", "twice", lambda: 1.0)


def test_a_histogram_counts_into_its_buckets():
    metrics = m.Metrics(process_facts=False)
    metrics.histogram("rose_wait_seconds", "wait", m.FIRST_TOKEN_BUCKETS_S, ["who"]).labels("a").observe(0.5)
    text = metrics.exposition().decode()
    assert 'rose_wait_seconds_bucket{le="0.4",who="a"} 0.0' in text
    assert 'rose_wait_seconds_bucket{le="0.5",who="a"} 1.0' in text


@pytest.mark.parametrize("name", [name for name in vars(m) if "BUCKETS" in name])
def test_buckets_rise(name):
    edges = getattr(m, name)
    assert list(edges) == sorted(set(edges)) and edges[0] > 0


def test_the_process_tells_about_itself():
    assert b"process_resident_memory_bytes" in m.Metrics().exposition()
