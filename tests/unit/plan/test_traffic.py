"""Traffic of a fleet: what a replica sees of it, hour by hour."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.unit.plan_world import CONTEXT_TOKENS, steady

from rose.errors import ConfigError
from rose.plan import traffic as module
from rose.plan.traffic import FleetTraffic, recorded_traffic, traffic_by_hand


def written(folder: Path, rows: list[tuple[float, int, int]]) -> Path:
    path = folder / "trace.csv"
    lines = [f"{at_s},{prompt},{output}" for at_s, prompt, output in rows]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    return path


def read(path: Path, hours: int = 24) -> FleetTraffic:
    return recorded_traffic(path, CONTEXT_TOKENS, hours, 240.0)


def test_hours_have_their_own_rates(tmp_path: Path) -> None:
    rows = [(float(at_s), 100, 10) for at_s in range(0, 3600, 2)] + [
        (float(at_s), 100, 10) for at_s in range(3600, 7200)
    ]
    traffic = read(written(tmp_path, rows))
    assert [hour.hour for hour in traffic.hours] == [0, 1]
    assert [hour.rate for hour in traffic.hours] == pytest.approx([0.5, 1.0], rel=0.01)
    assert traffic.requests_per_day == pytest.approx(0.75 * 86_400, rel=0.01)
    assert any("2 of 24 hours" in note for note in traffic.notes)


def test_the_second_day_counts_for_the_same_hours(tmp_path: Path) -> None:
    traffic = read(written(tmp_path, [(60.0 * minute, 100, 10) for minute in range(26 * 60)]))
    assert [len(hour.spans) for hour in traffic.hours] == [2, 2] + [1] * 22
    assert traffic.hours[0].window(0.99, 240.0)[0] > 86_400


def test_a_replica_gets_its_random_part(tmp_path: Path) -> None:
    traffic = read(written(tmp_path, [(float(at_s), 100 + at_s, 10) for at_s in range(2000)]))
    every = traffic.source.arrivals((0.0, 1000.0), 1.0, random.Random(0))
    tenth = traffic.source.arrivals((0.0, 1000.0), 0.1, random.Random(0))
    assert len(every) == 1000 and 60 < len(tenth) < 140
    assert every[7].at_s == 7.0 and every[7].prompt_tokens == 107


def test_the_busiest_window_is_found(tmp_path: Path) -> None:
    rows = [(10.0 * number, 100, 10) for number in range(300)] + [
        (2000 + 0.1 * number, 100, 10) for number in range(100)
    ]
    begin_s, end_s = read(written(tmp_path, rows)).busiest(60.0)
    assert begin_s <= 2010 <= end_s


def test_a_long_pause_is_told(tmp_path: Path) -> None:
    traffic = read(written(tmp_path, [(0.0, 9, 9), (10_000.0, 9, 9), (10_001.0, 9, 9)]))
    assert any("1 pauses without a request, the longest 2.8 h" in note for note in traffic.notes)


def test_unsorted_rows_and_empty_answers_are_mended(tmp_path: Path) -> None:
    traffic = read(written(tmp_path, [(5.0, 9, 0), (1.0, 0, 9), (3.0, 9, 9)]))
    arrivals = traffic.source.arrivals((0.0, 240.0), 1.0, random.Random(0))
    assert [one.at_s for one in arrivals] == [1.0, 3.0, 5.0]
    assert min(one.prompt_tokens for one in arrivals) == min(one.output_tokens for one in arrivals) == 1


def test_milliseconds_are_recognised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in milliseconds"):
        read(written(tmp_path, [(1000.0 * at_s, 9, 9) for at_s in range(3600)]))


def test_unix_time_gives_the_hours_of_the_day(tmp_path: Path) -> None:
    begin_s = 1_700_000_000 // 86_400 * 86_400 + 13.5 * 3600
    traffic = read(written(tmp_path, [(begin_s + at_s, 9, 9) for at_s in range(0, 3600, 2)]))
    assert [hour.hour for hour in traffic.hours] == [13, 14]
    assert [hour.rate for hour in traffic.hours] == pytest.approx([0.5, 0.5], rel=0.01)


def test_too_many_requests_for_one_replica_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ARRIVALS_MAX", 100)
    traffic = read(written(tmp_path, [(0.01 * number, 9, 9) for number in range(500)]))
    with pytest.raises(ConfigError, match="more than 100 requests in 240 s"):
        traffic.source.arrivals((0.0, 240.0), 1.0, random.Random(0))


def test_traffic_by_hand_has_its_rate_and_lengths() -> None:
    arrivals = steady(5.0).source.arrivals((0.0, 400.0), 1.0, random.Random(1))
    assert len(arrivals) == pytest.approx(2000, rel=0.1)
    assert sum(one.prompt_tokens for one in arrivals) / len(arrivals) == pytest.approx(400, rel=0.1)
    assert steady(0.0).source.arrivals((0.0, 400.0), 1.0, random.Random(1)) == []


@pytest.mark.parametrize("values", [(-1.0, 100, 10), (1.0, 0, 10), (1.0, 100, 40_000), (float("nan"), 100, 10)])
def test_numbers_by_hand_are_bounded(values: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError):
        traffic_by_hand(*values, CONTEXT_TOKENS)
