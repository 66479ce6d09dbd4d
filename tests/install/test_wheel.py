"""ROSE as a user installs it: the wheel, in an environment of its own, used in a folder that is not the repository.

`make test-install` builds the wheel and calls this. Nothing of the repository is visible to these processes: they find
the package, its data and its commands in the wheel, or not at all.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import rose

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
SMALL = ("steps=1", "groups.groups=2", "groups.size=4", "groups.dynamic_sampling=false", "evaluation.episodes=8")
DIST = os.environ.get("ROSE_DIST", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not DIST, reason="`make test-install` builds the wheel and says where it is"),
]


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = Path(DIST).glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands of a fresh environment that has the wheel."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "install", "-qq", "-c", CONSTRAINTS]
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([*pip, *shlex.split(os.environ.get("ROSE_PIP_OPTIONS", "")), torch], check=True)
    subprocess.run([*pip, wheel], check=True)
    return place / "bin"


def rose_in(folder: Path, commands: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the installed package in a folder, with an empty cache of compiled functions."""
    kept = ("PATH", "LANG", "LC_ALL")
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    variables |= {"HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    (folder / "home").mkdir(exist_ok=True)
    return subprocess.run([commands / "rose", *words], cwd=folder, env=variables, capture_output=True, text=True)


def test_the_wheel_and_the_source_archive_hold_all_files_of_the_package(wheel):
    package = ROOT / "src" / "rose"
    expected = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".nbi", ".nbc")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected
    assert wheel.name == f"rose_rl-{rose.__version__}-py3-none-any.whl"
    assert (wheel.parent / f"rose_rl-{rose.__version__}.tar.gz").exists()


def test_the_installed_commands_work_in_an_empty_folder(installed, tmp_path):
    assert rose_in(tmp_path, installed, "--version").stdout == f"rose {rose.__version__}\n"
    overrides = [word for setting in SMALL for word in ("--set", setting)]
    run = rose_in(tmp_path, installed, "run", "--name", "first", *overrides)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "trajectories lost: 0, counted twice: 0" in run.stdout
    summary = json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["lost"] == 0
    assert (tmp_path / "runs" / "first" / "report.html").stat().st_size > 10_000
    doctor = rose_in(tmp_path, installed, "doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("settings", "run"),
        ("sim", "--seeds", "0..1"),
        ("deploy", "k8s"),
        ("model", "new", "--preset", "qwen3-3m", "--out", "model"),
    ],
    ids=lambda words: words[0],
)
def test_commands_that_read_files_of_the_package_find_them(words, installed, tmp_path):
    answer = rose_in(tmp_path, installed, *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
