"""The page "Point your agents at ROSE" is true: its examples run, in order, at a gateway with a worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.integration import devices, gateways

from rose.models.presets import write_preset

PAGE = devices.ROOT / "docs" / "agents.md"


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    model = write_preset("qwen3-3m", tmp_path / "qwen3-3m", seed=0)
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"):
        running.has_open(1)
        names: dict[str, Any] = {}
        for block in blocks:
            here = block.replace("http://127.0.0.1:8002", running.url).replace("YOUR_AGENT_TOKEN", gateways.AGENT)
            exec(compile(here, str(PAGE), "exec"), names)
        [line] = [line for line in capsys.readouterr().out.splitlines() if "'trajectory'" in line]
        assert "'trajectory': 'episode-17', 'turn': 2, 'is_fork': False" in line
        assert running.ask("POST", "/v1/trajectories/episode-17/finish", {}).json["forks"] == 0
        assert running.ask("POST", "/v1/trajectories/episode-18/finish", {}).json["turns"] == 1
        names["client"].close()
