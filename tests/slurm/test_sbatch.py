"""deploy/slurm/rose.sbatch as a job of a real Slurm with one node: it trains, it ends, and it leaves no process."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.integration import devices
from tests.slurm.one_node import missing, slurm

from rose.models.presets import write_preset

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(900)]

SCRIPT = devices.ROOT / "deploy" / "slurm" / "rose.sbatch"
ONE_STEP = 'exec "$0" "$1" "$ROSE_MODEL" "$ROSE_GATEWAY" "$ROSE_RELAY" 1'
TRAINER = ["bash", "-c", ONE_STEP, sys.executable, str(devices.ROOT / "examples" / "own_trainer.py")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_preset("frozenlake-1m", tmp_path / "rollout", seed=0)


def submit(
    cluster: dict[str, str], folder: Path, *arguments: str, script: Path = SCRIPT, **variables: str
) -> tuple[int, str]:
    """Submit a script, wait for its end, and return its exit code and its log."""
    own = {"ROSE_PYTHON": sys.executable, "ROSE_LISTEN": "127.0.0.1", "ROSE_PORT": str(two_ports())}
    environment = cluster | devices.environment() | own | {"ROSE_STATE": str(folder / "state")} | variables
    environment["SLURM_CONF"] = cluster["SLURM_CONF"]
    command = ["sbatch", "--wait", "--time=12", f"--output={folder}/job.log", str(script), *arguments]
    job = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=840)
    logs = [path.read_text() for path in [folder / "job.log", *sorted(folder.glob("state/*.log"))] if path.exists()]
    return job.returncode, job.stderr + "".join(logs)


def two_ports() -> int:
    """Return a free port with a free successor, below those that `srun` takes for itself."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no port is free")


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of processes that name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line:
                found.append(line)
    return found


def test_a_job_trains_and_leaves_nothing(cluster: dict[str, str], tmp_path: Path, model: Path) -> None:
    code, log = submit(cluster, tmp_path, str(model), *TRAINER)
    assert code == 0, log
    assert "step 1:" in log and "of games won" in log
    assert "rollout is ready at http://127.0.0.1" in log  # the worker's and the gateway's
    devices.eventually(lambda: processes_of(tmp_path) == [])
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_a_trainer_that_fails_fails_the_job(cluster: dict[str, str], tmp_path: Path, model: Path) -> None:
    code, log = submit(cluster, tmp_path, str(model), "bash", "-c", "env | cut -d= -f1 | sort; exit 7")
    assert code == 7, log
    names = {name for name in log.splitlines() if name.startswith("ROSE_")}
    expected = {"TRAINER_TOKEN", "AGENT_TOKEN", "RELAY_SECRET", "MODEL", "GATEWAY", "RELAY"}
    assert names == {f"ROSE_{name}" for name in expected}  # and no other role's
    devices.eventually(lambda: processes_of(tmp_path) == [])


def test_a_gateway_that_cannot_start_ends_the_job(cluster: dict[str, str], tmp_path: Path) -> None:
    code, log = submit(cluster, tmp_path, str(tmp_path / "no-model"), "true")
    assert code != 0
    assert "the gateway did not start" in log and "no-model" in log
    devices.eventually(lambda: processes_of(tmp_path) == [])


@pytest.mark.parametrize(
    "arguments, variables, what",
    [([], {}, "which model?"), (["m"], {"ROSE_ENGINE": "sglang"}, "it can be embedded or vllm")],
)
def test_wrong_arguments_end_the_job(
    cluster: dict[str, str], tmp_path: Path, arguments: list[str], variables: dict[str, str], what: str
) -> None:
    code, log = submit(cluster, tmp_path, *arguments, **variables)
    assert code != 0
    assert what in log
