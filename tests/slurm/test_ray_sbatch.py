"""deploy/slurm/rose-ray.sbatch as a job of a real Slurm with one node: a run on Ray learns, and leaves no process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration import devices
from tests.integration.running import SMALL
from tests.slurm.one_node import missing
from tests.slurm.test_sbatch import cluster, model, processes_of, submit, two_ports

__all__ = ["cluster", "model"]

PYTHON = os.environ.get("ROSE_RAY_PYTHON", "")
why = missing() or ("" if PYTHON else "ROSE_RAY_PYTHON names no interpreter that has Ray; `make test-slurm` sets it")
pytestmark = [pytest.mark.skipif(bool(why), reason=why), pytest.mark.timeout(900)]

SCRIPT = devices.ROOT / "deploy" / "slurm" / "rose-ray.sbatch"


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder with a short name, because Ray makes sockets in it."""
    made = Path(tempfile.mkdtemp(prefix="rr-"))
    yield made / "ray"
    shutil.rmtree(made)


def variables(ray_folder: Path) -> dict[str, str]:
    own = {"ROSE_PYTHON": PYTHON, "ROSE_RAY_FOLDER": str(ray_folder), "ROSE_RAY_HOST": "127.0.0.1"}
    return own | {"ROSE_RAY_PORT": str(two_ports())}


def test_a_run_on_ray_learns_and_leaves_nothing(
    cluster: dict[str, str], tmp_path: Path, model: Path, ray_folder: Path
) -> None:
    small = [word for override in (*SMALL, "cluster.cpus=0.5") for word in ("--set", override)]
    words = ["--name", "small", "--set", f"runs={tmp_path}/runs", "--set", f"rollout_model={model}", *small]
    code, log = submit(cluster, tmp_path, *words, script=SCRIPT, **variables(ray_folder))
    assert code == 0, log
    assert "gateway is on " in log and "trajectories lost: 0, counted twice: 0" in log
    devices.eventually(lambda: processes_of(tmp_path) + processes_of(ray_folder) == [])
    assert not ray_folder.exists()
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_a_run_that_cannot_begin_fails_the_job(cluster: dict[str, str], tmp_path: Path, ray_folder: Path) -> None:
    code, log = submit(cluster, tmp_path, "--set", "no.such=1", script=SCRIPT, **variables(ray_folder))
    assert code not in (0, 1), log
    assert "no.such" in log
    devices.eventually(lambda: processes_of(ray_folder) == [])
