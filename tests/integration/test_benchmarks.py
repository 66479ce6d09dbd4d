"""The benchmarks run and write what they promise. What they measure is not for a test to judge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_engine_benchmark_writes_its_keys(tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    command = [sys.executable, str(BENCHMARKS / "engine.py"), "--quick", "--repeats", "1", "--models", "qwen3-3m"]
    done = subprocess.run([*command, "--batches", "1", "16", "--json", str(out)], capture_output=True, text=True)
    assert out.exists(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert {"benchmark", "command", "seed", "quick", "machine", "rows", "wanted"} <= found.keys()
    assert [row["batch"] for row in found["rows"]] == [1, 16]
    for row in found["rows"]:
        assert row["engine_tok_s"] > 0 and row["transformers_tok_s"] > 0 and row["ratio_transformers"] > 0
        assert row["model_time_over_bare_gemms"] > 0 and 0 < row["bookkeeping_share"] < 1
        assert row["vllm_tok_s"] is not None or "venv-vllm" in row["vllm_reason"]
    assert {entry["what"] for entry in found["wanted"]} >= {"qwen3-3m, batch 16: ratio_transformers"}


@pytest.mark.slow
def test_the_benchmark_of_streamed_publishing_writes_its_keys(tmp_path: Path) -> None:
    out = tmp_path / "publish_stream.json"
    command = [sys.executable, str(BENCHMARKS / "publish_stream.py"), "--quick", "--parameters", "8000000"]
    done = subprocess.run([*command, "--repeats", "1", "--json", str(out)], capture_output=True, text=True)
    assert out.exists(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [row["way"] for row in found["rows"]] == ["resident", "streamed", "gathered", "copied"] * 2
    assert all({"dtype", "publish_s", "ratio_time", "sent_mb"} <= row.keys() for row in found["rows"])
    assert [row["peak_over_model"] > 1 for row in found["rows"] if row["way"] == "streamed"] == [True, True]
    assert len(found["wanted"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, keys",
    [
        ("router", ["--routers", "cost"], {"decision_us", "decision_us_p99", "books_us"}),
        (
            "schedule",
            ["--setups", "8b", "--routers", "cost", "--likeness", "0.5", "--shrink", "32"],
            {"completion_s", "turn_p99_s", "prefix_hit_ratio", "over_lower_bound", "borrow_gain", "attainment"},
        ),
    ],
)
def test_the_benchmarks_of_scheduling_write_their_keys(
    tmp_path: Path, name: str, options: list[str], keys: set[str]
) -> None:
    out = tmp_path / f"{name}.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", *options, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert out.exists(), done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["benchmark"] == name and found["wanted"] and len(found["rows"]) == 3
    assert all(keys <= row.keys() for row in found["rows"])


@pytest.mark.slow
def test_the_benchmark_of_regrowth_writes_its_keys(tmp_path: Path) -> None:
    out = tmp_path / "regrowth.json"
    command = [sys.executable, str(BENCHMARKS / "regrowth.py"), "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert out.exists(), done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {row["rule"] for row in rows} >= {"hysteresis", "swap every 60 s"}
    assert all(row["rollout_tok_s"] > 0 and 0 <= row["redone_share"] < 1 and row["of_ideal"] < 1.1 for row in rows)


@pytest.mark.slow
def test_the_benchmark_of_the_kv_pool_writes_its_keys_and_loses_no_page(tmp_path: Path) -> None:
    out = tmp_path / "pool.json"
    command = [sys.executable, str(BENCHMARKS / "pool.py"), "--quick", "--kills", "30", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert out.exists(), done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert {row["part"] for row in rows} == {"hand-over", "cost", "deaths"} and all(row["median"] > 0 for row in rows)
    deaths = rows[-1]
    assert deaths["trials"] == 30
    assert all(deaths[name] == 0 for name in ("doubled", "lost", "overwritten", "serving_refused"))
