"""A trainer on 1, 2 and 4 ranks learns the same, publishes the same, and survives the death of a rank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.integration.devices import ROOT, environment
from tests.integration.ranked_trainer import NAME

from rose.models.presets import write_preset
from rose.models.tensors import open_tensors
from rose.train.checkpoint import load_checkpoint
from rose.train.policy_model import CausalModel
from rose.train.step import Trainer
from rose.weights.receive import Receiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 3
WAIT_S = 200.0
RELATIVE = 1e-4  # of loss and length of the gradient, between numbers of ranks: sums are taken in another order
LARGEST_GAP = 5e-5  # of a weight, after three steps of 1e-4 to 3e-4 each


class Trained:
    """The output of one attempt: its steps, and what else it said."""

    def __init__(self, runs: Path, model: Path, ranks: int, steps: int, *more: str) -> None:
        command = [sys.executable, "-m", "tests.integration.ranked_trainer", runs, model, ranks, steps, *more]
        done = subprocess.run(
            [str(word) for word in command],
            cwd=ROOT,
            env=environment() | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        lines = done.stdout.splitlines()
        self.code, self.words = done.returncode, done.stdout + done.stderr
        self.steps: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
        self.folder = runs / NAME

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:06d}"

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """The fp32 weights and moments of a checkpoint, put together from the files of all ranks."""
        parts: dict[str, list[np.ndarray]] = {}
        for file in sorted((self.checkpoint(step) / "trainer").glob("*.safetensors")):
            for name, array in load_file(file).items():
                parts.setdefault(name, []).append(array)
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}

    def digests(self, step: int) -> Any:
        state = json.loads((self.checkpoint(step) / "trainer" / "state.json").read_text())
        return state["files"] if "files" in state else state["sha256"]

    def bytes_by_rank(self) -> Counter[str]:
        """The bytes that each rank has put into the relay, by its number in the names of buckets."""
        found: Counter[str] = Counter()
        for path in self.folder.joinpath("weights").rglob("r?????.b*"):
            found[path.name[:6]] += path.stat().st_size
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Trained:
    """Two ranks without interruption, with which the others are compared."""
    trained = Trained(tmp_path_factory.mktemp("two"), model, 2, STEPS)
    assert trained.code == 0 and len(trained.steps) == STEPS + 1, trained.words
    return trained


def check_near(one: Trained, other: Trained) -> None:
    ours, theirs = one.steps[-STEPS:], other.steps[-STEPS:]
    assert [(s["step"], s["verdict"], s["tokens"]) for s in ours] == [
        (s["step"], s["verdict"], s["tokens"]) for s in theirs
    ]
    for key in ("loss", "norm"):
        assert [s[key] for s in ours] == pytest.approx([s[key] for s in theirs], rel=RELATIVE)
    before, after = one.tensors(STEPS), other.tensors(STEPS)
    gaps = [float(np.abs(before[name] - after[name]).max()) for name in before if name.startswith("weight/")]
    print(f"largest gap between weights after {STEPS} steps: {max(gaps):.2e}")
    assert before.keys() == after.keys() and max(gaps) < LARGEST_GAP


def check_receiver(trained: Trained) -> None:
    """What a worker receives is the whole model of the last checkpoint, and has the hash that was published."""
    secret = (trained.folder / "weights.secret").read_bytes().strip()
    receiver = Receiver(str(trained.folder / "weights"), NAME, secret=secret)
    received = receiver.fetch()
    weights = open_tensors(trained.checkpoint(STEPS))
    assert received is not None and received.hash == trained.steps[-1]["hash"]
    assert received.tensors.keys() == set(weights.names())
    assert all(np.array_equal(received.tensors[name], weights.bits16(name)) for name in weights.names())
    receiver.close()


@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_learn_what_one_learns_and_publish_only_their_own(tmp_path, model, two, ranks):
    other = Trained(tmp_path, model, ranks, STEPS)
    assert other.code == 0, other.words
    check_near(other, two)
    for trained, count in ((other, ranks), (two, 2)):
        pushed = trained.bytes_by_rank()
        print(f"{count} ranks pushed {dict(pushed)} bytes")
        assert len(pushed) == count
        assert all(abs(size * count / pushed.total() - 1) < 0.2 for size in pushed.values())
        check_receiver(trained)


ENDS = {
    "step": "another rank of the trainer ended",
    "checkpoint": "another rank of the trainer ended",
    "disk": "rank 1 of the trainer: .*File too large",
}


@pytest.mark.parametrize("moment", ENDS)
def test_a_failing_rank_ends_the_run_which_resumes_with_the_same_bits(tmp_path, model, two, moment):
    killed = Trained(tmp_path, model, 2, STEPS, "--kill", "2", moment)
    assert killed.code == 1, killed.words
    assert re.search(ENDS[moment], killed.words) and "Traceback" not in killed.words, killed.words
    assert not killed.checkpoint(2).exists(), "half a checkpoint has its name"
    resumed = Trained(tmp_path, model, 2, STEPS, "--resume")
    assert resumed.code == 0, resumed.words
    assert resumed.steps[0] == {"step": 1, "hash": two.steps[1]["hash"]}
    assert resumed.steps[1:] == two.steps[2:]
    assert [resumed.digests(step) for step in (2, 3)] == [two.digests(step) for step in (2, 3)]


def test_a_run_goes_on_on_other_numbers_of_ranks(tmp_path, model, two):
    parts = [Trained(tmp_path, model, 2, 1)]
    for steps, ranks in ((2, 4), (3, 1)):
        check_read_by_one(parts[-1], model, steps - 1)
        parts.append(Trained(tmp_path, model, ranks, steps, "--resume"))
        assert parts[-1].code == 0, parts[-1].words
    parts[-1].steps = [part.steps[-1] for part in parts]
    check_near(parts[-1], two)
    check_receiver(parts[-1])


def check_read_by_one(trained: Trained, model: Path, step: int) -> None:
    """A single rank reads what several have written, to the bit."""
    trainer = Trainer(CausalModel.load(model))
    load_checkpoint(trainer, trained.checkpoint(step))
    assert trainer.step == step and trainer.healthy is not None
    kept = trained.tensors(step)
    found = {f"weight/{name}": weight.detach().numpy() for name, weight in trainer.model.weights.items()}
    found |= {f"healthy.weight/{name}": weight.numpy() for name, weight in trainer.healthy.weights.items()}
    for name, state in trainer.moments().items():
        assert state["step"] == step
        found |= {f"{key}/{name}": state[key].numpy() for key in ("exp_avg", "exp_avg_sq")}
    assert all(np.array_equal(array, kept[name]) for name, array in found.items())
