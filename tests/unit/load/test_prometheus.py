"""Range queries of Prometheus as traffic."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.load.prometheus import is_prometheus
from rose.plan.traffic import prometheus_traffic

BEGIN_S = 1_700_000_000 // 86_400 * 86_400
BUCKETS = (("10", "0"), ("100", "50"), ("1000", "100"), ("+Inf", "100"))


def response(series: list[tuple[dict[str, str], list[tuple[float, str]]]]) -> dict[str, Any]:
    result = [{"metric": metric, "values": values} for metric, values in series]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def export(hours: int = 2, missing: int | None = None, **changes: Any) -> dict[str, Any]:
    times = [BEGIN_S + 60 * minute for minute in range(60 * hours) if minute // 60 != missing]
    rates = [({"instance": name}, [(at_s, "1.5") for at_s in times]) for name in ("a", "b")]
    histogram = response([({"le": edge}, [(times[-1], count)]) for edge, count in BUCKETS])
    return {"request_rate": response(rates), "prompt_tokens": histogram, "output_tokens": histogram} | changes


def written(folder: Path, document: Any) -> Path:
    path = folder / "metrics.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_series_are_added_up_and_lengths_follow_the_histogram(tmp_path: Path) -> None:
    path = written(tmp_path, export())
    traffic = prometheus_traffic(path, 32_768, 24)
    assert is_prometheus(path)
    assert [hour.rate for hour in traffic.hours] == pytest.approx([3.0, 3.0])
    span = traffic.hours[0].window(0.5, 1000.0)
    arrivals = traffic.source.arrivals(span, 1.0, random.Random(0))
    assert len(arrivals) == pytest.approx(3000, rel=0.1)
    below = sum(one.prompt_tokens <= 100 for one in arrivals) / len(arrivals)
    assert below == pytest.approx(0.5, abs=0.05) and max(one.output_tokens for one in arrivals) <= 1000


def test_missing_samples_are_no_idle_hour(tmp_path: Path) -> None:
    traffic = prometheus_traffic(written(tmp_path, export(3, missing=1)), 32_768, 24)
    assert [hour.hour for hour in traffic.hours] == [0, 2]
    assert any("1 hours have less than half" in note for note in traffic.notes)


@pytest.mark.parametrize(
    "document, message",
    [
        ("{not json", "no export of Prometheus"),
        ({"request_rate": 1}, "no export of Prometheus"),
        (export(prompt_tokens={"status": "error"}), "no export of Prometheus"),
        (export(prompt_tokens=response([({}, [(1.0, "5")])])), "without the label le"),
        (export(prompt_tokens=response([({"le": "10"}, [(1.0, "0")])])), "histogram prompt_tokens is empty"),
        (export(request_rate=response([({}, [(1.0, "NaN")])])), "`NaN` is no count or rate"),
        (export(request_rate=response([({}, [(1.0, "3")])])), "no hour has half of its samples"),
        (export(request_rate=response([({}, [])])), "no export of Prometheus"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prometheus_traffic(written(tmp_path, document), 32_768, 24)


def test_a_trace_is_no_export(tmp_path: Path) -> None:
    assert not is_prometheus(written(tmp_path, '{"timestamp": 0, "input_length": 6758, "output_length": 500}\n'))
    assert not is_prometheus(tmp_path / "nothing")
