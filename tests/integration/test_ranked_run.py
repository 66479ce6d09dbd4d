"""`rose run` with a trainer on two ranks: killed at any point it is resumed and ends with the same bits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.devices import ROOT, environment
from tests.integration.running import SMALL, Run, kill, kill_all, processes_of
from tests.integration.test_resume import check_last_weights, ended_members, story, until_members_ended

from rose.train.recipes import Recipe
from rose.train.warmstart import make_warm_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
JOB = (
    f"steps={STEPS}",
    "train.ranks=2",
    "groups.size=8",
    "groups.dynamic_sampling=true",
    "groups.draws_max=6",
    "evaluation.every_steps=0",
    "checkpoint.keep=2",
    "serving.is_borrowed=false",
)
WAIT_S = 180.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It plays well enough for some members of most groups to do better than others."""
    recipe = Recipe(games=400, epochs=1, rows=4, learning_rate=2e-3, warm_up_updates=5, turns_max=4)
    return make_warm_start(recipe, tmp_path_factory.mktemp("model") / "frozenlake-1m")


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.end()


def digests(folder: Path) -> Any:
    state = json.loads((folder / "checkpoints" / f"step-{STEPS:06d}" / "trainer" / "state.json").read_text())
    return state["files"]


def test_a_rank_or_all_are_killed_and_the_bits_are_the_same(tmp_path, model, runs):
    whole = Run(tmp_path / "whole", model, *JOB)
    runs.append(whole)
    assert whole.wait(WAIT_S) == 0, whole.words
    runs.append(Run(tmp_path, model, *JOB))
    folder = runs[-1].folder
    until_members_ended(runs[-1], 20)
    [rank] = processes_of(runs[-1].processes(), "rose.run.trainer_rank")
    kill(rank)
    assert runs[-1].wait(WAIT_S) == 1 and runs[-1].has_said("rank-1 died|another rank"), runs[-1].words
    assert runs[-1].processes() == {} and "rose run --resume" in runs[-1].words
    runs.append(Run.resumed(folder))
    until_members_ended(runs[-1], ended_members(runs[-1]) + 20)
    kill_all(runs[-1])
    assert runs[-1].wait() == -signal.SIGKILL
    runs.append(Run.resumed(folder))
    assert runs[-1].wait(WAIT_S) == 0, runs[-1].words
    assert story(runs[-1]) == story(whole) and digests(folder) == digests(whole.folder)
    check_last_weights(runs[-1])
    assert "Traceback" not in runs[-1].words and runs[-1].processes() == {}


def test_torchrun_starts_the_ranks(tmp_path, model):
    given = [f"runs={tmp_path}", f"rollout_model={model}", *SMALL, *JOB, "steps=1", "groups.draws_max=2"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "rose",
        "run",
    ]
    done = subprocess.run(
        [*command, "--name", "it", *(word for override in given for word in ("--set", override))],
        cwd=ROOT,
        env=environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 of 2 is in place" in done.stdout and "report:" in done.stdout
    assert len(digests_of_first(tmp_path / "it")) == 4
    assert not (tmp_path / "it" / "logs" / "rank-1.log").exists(), "the run started a rank of its own"


def digests_of_first(folder: Path) -> Any:
    return json.loads((folder / "checkpoints" / "step-000001" / "trainer" / "state.json").read_text())["files"]
