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
