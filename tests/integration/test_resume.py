"""A run that is killed at any point and resumed ends with the weights of one that was never interrupted, bit by bit.

Without anybody in between the run is played once, on the dedicated worker alone. The others are killed in many ways,
also with a borrowed device whose users come and go: whoever computes a turn, it comes out the same.
"""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.devices import eventually
from tests.integration.running import Run, kill, kill_all
from tests.integration.test_run import verified
from tests.unit.launch_lines import counted, read_lines

from rose.train.recipes import Recipe
from rose.train.warmstart import make_warm_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 5
JOB = (
    f"steps={STEPS}",
    "groups.size=8",
    "groups.dynamic_sampling=true",
    "groups.draws_max=6",
    "evaluation.every_steps=3",
    "checkpoint.keep=2",
    "serving.is_borrowed=false",
)
WHO_COMPUTED = ("is_borrowed", "turns_by_pool", "weights_kind", "weights_bytes", "weights_ratio", "weights_lag")
WAIT_S = 180.0
FILE_BYTES = 3 << 20  # the weights in bf16 fit, the trainer's state does not


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It plays well enough for some members of most groups to do better than others."""
    recipe = Recipe(games=400, epochs=1, rows=4, learning_rate=2e-3, warm_up_updates=5, turns_max=4)
    return make_warm_start(recipe, tmp_path_factory.mktemp("model") / "frozenlake-1m")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Run]:
    """What all the others are compared with."""
    run = Run(tmp_path_factory.mktemp("whole"), model, *JOB)
    assert run.wait(WAIT_S) == 0, run.words
    yield run
    run.end()


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.end()


def lines_of(run: Run) -> list[dict[str, Any]]:
    return counted(read_lines(run.folder / "metrics.jsonl"))


def story(run: Run) -> list[dict[str, Any]]:
    """Everything about the steps but who computed what, and how long it took."""
    steps = [line for line in lines_of(run) if line["kind"] == "step"]
    return [{key: value for key, value in step.items() if not is_by_chance(key)} for step in steps]


def is_by_chance(key: str) -> bool:
    return key in WHO_COMPUTED or key.endswith("_s")


def evaluations(run: Run) -> list[tuple[int, float]]:
    return [(line["step"], line["success_rate"]) for line in lines_of(run) if line["kind"] == "evaluation"]


def trained(run: Run) -> tuple[int, str]:
    """The last step, and the digest of weights and moments in fp32."""
    state = json.loads((run.folder / "checkpoints" / f"step-{STEPS:06d}" / "trainer" / "state.json").read_text())
    return state["step"], state["sha256"]


def ended_members(run: Run) -> int:
    path = run.folder / "journal.jsonl"
    return path.read_bytes().count(b"MemberEnded") if path.exists() else 0


def until_members_ended(run: Run, members: int) -> None:
    eventually(lambda: ended_members(run) >= members or run.process.poll() is not None)
    assert run.process.poll() is None, run.words


def check_last_weights(run: Run) -> None:
    """Trainer, workers and relay hold the same, and say so by hash."""
    last = run.metrics("weights")[-1]
    assert last["workers"] and set(last["workers"].values()) == {last["hash"]}
    assert last["hash"] in verified(run)
    assert run.metrics("finished")[-1]["step"] == run.summary()["steps"]


def check_same(run: Run, whole: Run) -> None:
    assert story(run) == story(whole) and evaluations(run) == evaluations(whole)
    assert len({step["weights_hash"] for step in story(whole) if "weights_hash" in step}) >= 3, "hardly anything learnt"
    assert trained(run) == trained(whole)
    check_last_weights(run)
    mine, its = run.summary(), whole.summary()
    keys = ("steps", "trajectories", "turns", "generated_tokens", "begun", "returned", "lost", "doubled", "differing")
    assert {key: mine[key] for key in keys} == {key: its[key] for key in keys}
    assert (mine["lost"], mine["doubled"], mine["differing"]) == (0, 0, 0)
    assert "Traceback" not in run.words and run.processes() == {}


def test_killed_in_mid_step_again_and_again(tmp_path, model, whole, runs):
    """At points by the dice, and once while it starts; with everything it has started, or the run alone."""
    dice = random.Random(7)
    runs.append(Run(tmp_path, model, *JOB))
    folder = runs[-1].folder
    runs[-1].until_said("starting gateway")
    kill_all(runs[-1])
    runs[-1].wait()
    for how in (kill_all, lambda run: kill(run.process.pid)):
        runs.append(Run.resumed(folder))
        until_members_ended(runs[-1], ended_members(runs[-1]) + dice.randrange(30, 60))
        how(runs[-1])
        assert runs[-1].wait() == -signal.SIGKILL
    assert runs[1].has_said("the run begins again, with the same settings")
    runs.append(Run.resumed(folder))
    assert runs[-1].wait(WAIT_S) == 0, runs[-1].words
    assert runs[-1].has_said("going on after step [1-5], from")
    check_same(runs[-1], whole)
    assert runs[-1].summary()["resumes"] == 3 and len(runs[-1].metrics("resume")) == 3
    check_finished_and_given_more(folder, runs)


def check_finished_and_given_more(folder: Path, runs: list[Run]) -> None:
    runs.append(Run.resumed(folder))
    assert runs[-1].wait(WAIT_S) == 0 and "is finished" in runs[-1].words and not runs[-1].has_said("starting gateway")
    runs.append(Run.resumed(folder, "--set", f"steps={STEPS + 1}"))
    runs[-1].until_said("starting gateway")
    beside = Run.resumed(folder, "--set", f"steps={STEPS + 1}")
    assert beside.wait() == 2 and "still going on" in beside.words
    assert runs[-1].wait(WAIT_S) == 0, runs[-1].words
    assert [step["step"] for step in story(runs[-1])] == list(range(1, STEPS + 2))
    check_last_weights(runs[-1])


def test_a_full_disk_a_corrupted_checkpoint_and_a_borrowed_device(tmp_path, model, whole, runs):
    """The disk is full when the first checkpoint is written; later the newest one is spoilt while the run is dead."""
    job = [*JOB, "serving.is_borrowed=true", "worker.max_sequences=2"]
    runs.append(Run(tmp_path, model, *job))
    folder = runs[-1].folder
    runs[-1].until_said("ready: users are served")
    resource.prlimit(runs[-1].process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    assert runs[-1].wait() == 1 and "cannot be written" in runs[-1].words, runs[-1].words
    assert list((folder / "checkpoints").iterdir()) == []
    runs.append(Run.resumed(folder))
    runs[-1].until_said(rf"step +3/{STEPS}")
    kill_all(runs[-1])
    runs[-1].wait()
    spoil(newest(folder))
    runs.append(Run.resumed(folder))
    assert runs[-1].wait(WAIT_S) == 0, runs[-1].words
    assert runs[-1].has_said("step-00000[2-5] is left out: ")
    check_same(runs[-1], whole)
    assert runs[-1].summary()["turns_by_pool"]["borrowed"] > 0


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*")) / "trainer" / "state.safetensors"


def spoil(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
