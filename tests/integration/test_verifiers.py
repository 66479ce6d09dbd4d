"""Episodes of `verifiers` through the gateway: its training client, unchanged, gets exact tokens of one trajectory.

verifiers lives in an environment of its own, which `make test-all` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tests.integration import devices, gateways

from rose.models.presets import write_preset

PYTHON = Path(os.environ.get("ROSE_VERIFIERS_PYTHON", devices.ROOT / ".venv-verifiers" / "bin" / "python"))
EPISODES, SEED, MODEL_TOKENS = 4, 7, 8
TIMEOUT_S = 600


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.skipif(not PYTHON.exists(), reason="verifiers is not here: make venv-verifiers")
def test_verifiers_training_client_gets_what_the_model_drew(tmp_path: Path) -> None:
    model = write_preset("frozenlake-1m", tmp_path / "frozenlake-1m", seed=0)
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"):
        running.has_open(1)
        episodes = play(running.url, model)
        counts = running.pool()["counts"]
        assert [episode["errors"] for episode in episodes] == [[]] * EPISODES
        assert [episode["turns"] for episode in episodes] == [3, 4, 5, 3]
        assert counts["ended"] == counts["begun"] == sum(episode["turns"] for episode in episodes)
        for episode in episodes:
            [branch] = episode["branches"]
            check_tokens(running, branch)
            finished = running.ask("POST", f"/v1/trajectories/{episode['trace']}/finish", {})
            assert finished.json == {"id": episode["trace"], "turns": episode["turns"], "forks": 0}


def play(url: str, model: Path) -> list[dict[str, Any]]:
    here = Path(__file__).parent
    variables = {"PYTHONPATH": str(here), "PLAYER_KEY": gateways.AGENT, "HF_HUB_OFFLINE": "1"}
    command = [str(PYTHON), str(here / "verifiers_player.py"), url, str(model), str(EPISODES), str(SEED)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == EPISODES, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in lines]


def check_tokens(running: gateways.RunningGateway, branch: dict[str, Any]) -> None:
    """Every answer of the branch is what the same prompt gives again, log-probabilities and all."""
    place = 0
    for is_sampled, run in groupby(branch["mask"]):
        end = place + len(list(run))
        if is_sampled:
            wanted = {"max_tokens": MODEL_TOKENS, "seed": SEED, "temperature": 1.0, "ignore_eos": False}
            [again] = running.turn(branch["ids"][:place], **wanted).json["choices"]
            assert again["token_ids"] == branch["ids"][place:end]
            assert [entry["logprob"] for entry in again["logprobs"]["content"]] == branch["logprobs"][place:end]
        place = end
