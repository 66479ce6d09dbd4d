"""The benchmarks of the gateway run and write what they promise. How fast they are is not for a test to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = {"benchmark", "command", "seed", "quick", "machine", "rows", "wanted"}


def figures_of(name: str, out: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--json", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCHMARKS.parent)
    assert out.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found.keys() >= SHAPE and found["benchmark"] == name
    return found


@pytest.mark.slow
def test_the_gateway_benchmark_writes_its_keys(tmp_path: Path) -> None:
    found = figures_of("gateway", tmp_path / "gateway.json", "--stub-concurrent", "4", "--concurrent", "8")
    assert found.keys() >= {"added_p50_ms", "added_p99_ms", "control_cpu_ms_per_turn", "turns_s_max"}
    assert found["turns_s_max"] > 0 and len(found["wanted"]) == 4
    stub = found["rows"][0]
    assert stub["direct_p50_ms"] >= 500 and stub["gateway_p50_ms"] >= 500


@pytest.mark.slow
def test_the_live_benchmark_loses_and_doubles_nothing(tmp_path: Path) -> None:
    found = figures_of("live", tmp_path / "live.json", "--trajectories", "12")
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert found["completion_s"] > 0 and found["completion_dedicated_s"] > 0
    assert [row["setup"] for row in found["rows"]] == ["dedicated", "dedicated + borrowed"]


@pytest.mark.slow
def test_the_shards_benchmark_writes_its_keys(tmp_path: Path) -> None:
    found = figures_of("shards", tmp_path / "shards.json")
    assert found["speedup"] > 0 and found["completion_ratio"] > 0 and len(found["wanted"]) == 2
    assert [(row["case"], row["shards"]) for row in found["rows"]] == [
        ("live", 1), ("live", 2), ("virtual", 1), ("virtual", 16),
    ]  # fmt: skip
