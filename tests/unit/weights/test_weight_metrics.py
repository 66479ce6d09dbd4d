"""What workers report about weights: however wrong, the gateway's metrics neither grow nor fail."""

from __future__ import annotations

import math

import pytest
from prometheus_client import generate_latest

from rose.observe.metrics import Metrics
from rose.weights.weight_metrics import KINDS, OTHER, PHASES, FleetMetrics


@pytest.fixture
def shown() -> tuple[FleetMetrics, Metrics]:
    metrics = Metrics(process_facts=False)
    return FleetMetrics(metrics, list), metrics


def text(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


def test_labels_that_workers_invent_become_one(shown: tuple[FleetMetrics, Metrics]) -> None:
    fleet, metrics = shown
    fleet.taken(1, {"fetch": 0.1} | {f"phase {number}": 0.1 for number in range(5000)})
    for number in range(5000):
        fleet.failed_by(f"kind {number}")
    fleet.failed_by("Unavailable")
    lines = text(metrics).splitlines()
    assert len(lines) < 300 and f'rose_weights_failures_total{{kind="{OTHER}"}} 5000.0' in lines
    assert 'rose_weights_failures_total{kind="Unavailable"} 1.0' in lines
    assert 'rose_weights_seconds_count{phase="fetch"} 1.0' in lines


@pytest.mark.parametrize("size_bytes", [-1, 1 << 51, 2**70, math.nan, math.inf])
def test_a_size_that_cannot_be_true_is_left_out(shown: tuple[FleetMetrics, Metrics], size_bytes: float) -> None:
    fleet, metrics = shown
    fleet.taken(7, {})
    fleet.taken(size_bytes, {})  # type: ignore[arg-type]
    assert "rose_weights_received_bytes_total 7.0" in text(metrics)


@pytest.mark.parametrize("spent_s", [-1.0, math.nan, math.inf, 1e9])
def test_a_time_that_cannot_be_true_is_left_out(shown: tuple[FleetMetrics, Metrics], spent_s: float) -> None:
    fleet, metrics = shown
    fleet.taken(7, {"commit": 0.5, "total": 0.5})
    fleet.taken(7, {"commit": spent_s, "total": spent_s})
    lines = text(metrics).splitlines()
    assert "rose_weights_pause_seconds_sum 0.5" in lines and 'rose_weights_seconds_sum{phase="total"} 0.5' in lines


def test_every_known_label_is_shown_as_it_is(shown: tuple[FleetMetrics, Metrics]) -> None:
    fleet, metrics = shown
    fleet.spent(dict.fromkeys(PHASES, 0.1))
    for kind in KINDS:
        fleet.failed_by(kind)
    assert f'"{OTHER}"' not in text(metrics)
