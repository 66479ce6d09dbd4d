"""TRL's AsyncGRPOTrainer, as released, trains on the devices of a gateway, one of which is killed.

TRL lives in an environment of its own (`make venv-trl`, or the interpreter that ROSE_TRL_PYTHON names). Of TRL only one
kernel for GPUs is replaced: see tests/support/trl_on_cpu.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration import devices, gateways
from tests.integration.lent import lent
from tests.unit.adapters.trl_world import publish

from rose.adapters.trl import RosePool
from rose.models.presets import write_preset
from rose.weights.keys import SECRET

PYTHON = Path(os.environ.get("ROSE_TRL_PYTHON", devices.ROOT / ".venv-trl" / "bin" / "python"))
ON_CPU = devices.ROOT / "tests" / "support" / "trl_on_cpu.py"
TRAINING, SYNCHRONOUS = (Path(__file__).with_name(name) for name in ("trl_training.py", "trl_synchronous.py"))
TIMEOUT_S = 900
GROUP_SIZE, STEP_SAMPLES, STEPS, MAX_STALENESS = 4, 32, 12, 4
CONFIG = {
    "max_steps": STEPS,
    "per_device_train_batch_size": STEP_SAMPLES,
    "gradient_accumulation_steps": 1,
    "num_generations": GROUP_SIZE,
    "max_completion_length": 2,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
ASYNCHRONOUS = CONFIG | {"max_staleness": MAX_STALENESS, "token_budget": -1}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(TIMEOUT_S + 60),
    pytest.mark.skipif(not PYTHON.exists(), reason="TRL is not here: make venv-trl, or name it by ROSE_TRL_PYTHON"),
]


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gateways.TOKENS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SECRET, "a-secret-of-these-tests-and-no-other")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0)


@contextmanager
def trainer(script: Path, *arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [str(PYTHON), str(ON_CPU), str(script), *arguments]
    environment = devices.environment() | {"OMP_NUM_THREADS": "1"}
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, env=environment
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def lines_of(process: subprocess.Popen[str], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects that the trainer prints, to its end."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"'):
            yield json.loads(line)
    process.wait()
    assert process.returncode == 0, errors_of(folder)


def errors_of(folder: Path) -> str:
    return (folder / "stderr").read_text()[-4000:]


def request(folder: Path, model: Path, url: str, config: dict[str, Any]) -> str:
    wanted = {"folder": str(folder), "model": str(model), "gateway": url, "config": config}
    (folder / "request.json").write_text(json.dumps(wanted))
    return str(folder / "request.json")


def test_the_released_trainer_learns_while_a_worker_is_killed(model: Path, tmp_path: Path, capsys: Any) -> None:
    """On a dedicated device, which is killed in step 2 and replaced, and one that a serving model lends."""
    serving = write_preset("frozenlake-1m", tmp_path / "serving")
    with gateways.gateway(model, "max_staleness=1", "beat_s=0.2") as running:
        more = ["--gateway", running.url, "--worker-name", "borrowed"]
        with (
            gateways.worker(model, running.url, "dedicated") as dedicated,
            lent(serving, model, *more),
            trainer(TRAINING, request(tmp_path, model, running.url, ASYNCHRONOUS), folder=tmp_path) as process,
        ):
            steps = []
            for line in lines_of(process, tmp_path):
                steps.append(line)
                if line.get("step") == 2:
                    os.kill(dedicated.process.pid, signal.SIGKILL)
            with gateways.worker(model, running.url, "replacement"):
                end = steps.pop()
                devices.eventually(lambda: len(running.members(hash=end["hash"])) == 2)
                assert sorted(running.members()) == ["borrowed", "replacement"]
    with capsys.disabled():
        print(f"\nrewards {[round(step['reward'], 2) for step in steps]}; {end}")
    check_balance(end, steps)
    assert max(step["sample/staleness_max"] for step in steps) <= MAX_STALENESS
    assert max(end["first_difference"], end["last_difference"]) < 1e-2
    rewards = [step["reward"] for step in steps]
    assert len(rewards) == STEPS and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def check_balance(end: dict[str, Any], steps: list[dict[str, Any]]) -> None:
    """Check that what was begun came once or is not finished, and that the trainer took what came."""
    counts = end["counts"]
    assert set(counts) <= {"begun", "delivered", "stale"}, counts
    assert counts["begun"] - counts["delivered"] - counts.get("stale", 0) <= end["unfinished"]
    assert end["came"] == end["distinct"] == counts["delivered"] == end["taken"] + end["left"]
    assert end["group_sizes"] == [GROUP_SIZE] or counts.get("stale")
    trained = sum(step["batch/samples_per_step"] + (step["sample/dropped_stale_total"] or 0) for step in steps)
    assert 0 <= end["taken"] - trained <= STEP_SAMPLES  # the rest waits in a batch that is not full


def test_the_example_learns(model: Path, tmp_path: Path) -> None:
    with gateways.gateway(model, "max_staleness=1") as running, gateways.worker(model, running.url, "a"):
        arguments = [str(model), running.url, str(tmp_path / "relay"), "10"]
        with trainer(devices.ROOT / "examples" / "trl_async_grpo.py", *arguments, folder=tmp_path) as process:
            output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors_of(tmp_path)
    [line] = re.findall(r"mean reward of each step: (.*)", output)
    rewards = [float(reward) for reward in line.split(",")]
    assert len(rewards) == 10 and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3


def test_the_synchronous_trainer_learns_on_its_own_weights(model: Path, tmp_path: Path) -> None:
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"):
        config = CONFIG | {"max_steps": 8, "num_generations": 8}
        with trainer(SYNCHRONOUS, request(tmp_path, model, running.url, config), folder=tmp_path) as process:
            [end] = lines_of(process, tmp_path)
    assert end["versions"] == len(end["rewards"]) == 8
    assert sum(end["rewards"][-3:]) / 3 > sum(end["rewards"][:2]) / 2 + 0.2


TROUBLE = {
    "the gateway ends": r"the gateway at http://127\.0\.0\.1:\d+ cannot be reached",
    "another trainer takes the run": "another trainer has taken over run `trl-test`",
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_trouble_ends_the_trainer_with_an_error_that_names_it(model: Path, tmp_path: Path, trouble: str) -> None:
    with gateways.gateway(model, "max_staleness=1") as running, gateways.worker(model, running.url, "a"):
        config = ASYNCHRONOUS | {"max_steps": 1000, "heartbeat_stale_after_s": 60.0}
        with trainer(TRAINING, request(tmp_path, model, running.url, config), folder=tmp_path) as process:
            lines = lines_of(process, tmp_path)
            assert next(lines)["step"] == 1
            if trouble == "the gateway ends":
                devices.end(running.device)
            else:
                pool = RosePool(model, gateway=running.url, relay=str(tmp_path / "relay"), run="trl-test")
                publish(pool).destroy()
            with pytest.raises(AssertionError, match=TROUBLE[trouble]):
                list(lines)
    assert process.returncode == 1


def test_a_wrong_token_ends_the_trainer_before_the_first_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gateways.gateway(model) as running:
        monkeypatch.setenv("ROSE_TRAINER_TOKEN", "not-the-token-of-this-gateway")
        with trainer(TRAINING, request(tmp_path, model, running.url, ASYNCHRONOUS), folder=tmp_path) as process:
            with pytest.raises(AssertionError, match="the gateway answered 401"):
                list(lines_of(process, tmp_path))
