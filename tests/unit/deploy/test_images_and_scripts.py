"""The Dockerfile and the scripts: what linters find, and that what they copy and call exists."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from tests.needs import needs
from tests.unit.deploy.test_rendering import parse

from rose.deploy.deploy_values import EXAMPLE_TRAINER
from rose.deploy.pod_parts import USER

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
SCRIPT = ROOT / "deploy" / "slurm" / "rose.sbatch"
RAY_SCRIPT = ROOT / "deploy" / "slurm" / "rose-ray.sbatch"
EXAMPLE = ROOT / "examples" / "two_clusters.sh"
SCRIPTS = Path(sysconfig.get_path("scripts"))


@needs("deploy-tests")
@pytest.mark.parametrize(
    "command", [["hadolint", str(DOCKERFILE)], *(["shellcheck", str(path)] for path in (SCRIPT, RAY_SCRIPT, EXAMPLE))]
)
def test_linters_find_nothing(command: list[str]) -> None:
    linted = subprocess.run([str(SCRIPTS / command[0]), command[1]], capture_output=True, text=True, timeout=60)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def instructions() -> list[tuple[str, str]]:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    found = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, rest in found]


def test_the_image_has_a_pinned_base_and_the_user_of_the_pods() -> None:
    found = instructions()
    bases = [rest.partition("=")[2] for name, rest in found if name == "ARG" and rest.startswith("BASE=")]
    assert len(bases) == 1 and re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", bases[0])
    assert [rest for name, rest in found if name == "USER"] == [f"{USER}:{USER}"]
    assert not [rest for name, rest in found if name in ("ARG", "ENV") and re.search("TOKEN|SECRET|PASSWORD", rest)]


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    copied = [word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]]
    kept = {line[1:] for line in (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)
    [workdir, *_] = [rest for name, rest in instructions() if name == "WORKDIR"]
    example = Path(EXAMPLE_TRAINER[1]).relative_to(workdir)
    assert (ROOT / example).exists() and example.parts[0] in copied


@pytest.mark.parametrize("script, expected", [(SCRIPT, {"gateway", "relay", "serve", "lend"}), (RAY_SCRIPT, {"run"})])
def test_every_rose_command_of_a_script_is_read_by_its_parser(script: Path, expected: set[str]) -> None:
    text = script.read_text().replace("\\\n", " ")
    lines = re.findall(r"-m rose ([^>&\n]*?)(?:\)|>|&|\n|\'|$)", text)
    commands = [[word.strip("\"'") for word in line.split()] for line in lines]
    assert {command[0] for command in commands} == expected
    for command in commands:
        parse(["rose", *(re.sub(r"\$\S+", "8002", word) for word in command)])


@pytest.mark.parametrize("script", [SCRIPT, RAY_SCRIPT])
def test_a_script_is_executable_bash_with_a_time_limit(script: Path) -> None:
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n") and os.access(script, os.X_OK)
    assert "set -euo pipefail" in text and re.search(r"^#SBATCH --time=", text, re.MULTILINE)
