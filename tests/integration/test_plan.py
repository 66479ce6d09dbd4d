"""`rose plan` as a process of its own: from a trace to the screen, the JSON and the page."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_plan_from_a_trace_has_all_its_parts(tmp_path: Path) -> None:
    chance, at_s = random.Random(0), 0.0
    rows = ["arrival_s,prompt_tokens,output_tokens"]
    while at_s < 900:
        at_s += chance.expovariate(0.5)
        rows.append(f"{at_s:.3f},{chance.randint(50, 1500)},{chance.randint(5, 80)}")
    (tmp_path / "trace.csv").write_text("\n".join(rows))
    command = [
        sys.executable, "-m", "rose", "plan", "--trace", "trace.csv", "--devices", "2xh800",
        "--serving", "qwen2.5-7b:tp1", "--rollout", "qwen3-8b",
        "--job", "grpo:16x4,turns=tools", "--dedicated", "1", "--train-gpus", "1",
        "--json", "plan.json", "--html", "plan.html",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("borrowed GPUs", "in budget", "break-even", "Simulated, not measured"):
        assert words in done.stdout
    report = json.loads((tmp_path / "plan.json").read_text())
    assert 0 < report["lent_share"]["value"] <= 1 and report["requests"] > 0
    assert [point["devices"] for point in report["points"]] == [0, 1, 2]
    assert "<svg" in (tmp_path / "plan.html").read_text()
