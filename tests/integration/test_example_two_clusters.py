"""examples/two_clusters.sh as its readers start it: what it prints holds, and it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration import devices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 2
NOT_HERE = 77
MARK = "ROSE_TEST_TWO_CLUSTERS"


@pytest.fixture
def example(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    variables = {"ROSE_PYTHON": sys.executable, "TMPDIR": str(tmp_path), MARK: str(tmp_path)}
    command = [str(devices.ROOT / "examples" / "two_clusters.sh"), str(STEPS)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = devices.environment() | variables
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.terminate()  # it ends what it has started
            process.wait()
    assert processes_with(f"{MARK}={tmp_path}") == []
    assert not list(tmp_path.glob("tmp.*"))  # what mktemp makes; torch keeps a cache there too
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, timeout=30).stdout
    assert not re.search(rf"rose-\w+-{process.pid}\b", spaces)


def processes_with(variable: str) -> list[str]:
    """Return the command lines of processes that have this variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:  # no process, one of another user, or one that has ended
            continue
    return found


def skip_if_not_here(code: int, errors: str) -> None:
    if code == NOT_HERE:
        assert re.search("not permitted|denied|not installed", errors), errors  # a wrong command is no reason to skip
        pytest.skip(f"no network namespaces here: {errors.strip()}")


def test_training_and_serving_in_two_networks_lose_nothing(example, capsys):
    output, errors = example.communicate()
    skip_if_not_here(example.returncode, errors)
    assert example.returncode == 0, errors
    with capsys.disabled():
        print(f"\n{output}", end="")
    versions = re.findall(r"^version (\d+)-\w+: trainer (\w{12}), (.*)$", output, re.MULTILINE)
    assert [int(version) for version, _, _ in versions] == list(range(STEPS))
    assert all(sorted(running.split(", ")) == [f"far {mine}", f"near {mine}"] for _, mine, running in versions)
    assert len({mine for _, mine, _ in versions}) == STEPS, "each step changes the weights"
    turns = {
        kind: int(count.replace(",", "")) for count, kind in re.findall(r"([\d,]+) (\w+) \((?:near|far)\)", output)
    }
    assert set(turns) == {"dedicated", "borrowed"} and turns["borrowed"] > 0
    played = STEPS * 64
    assert f"trajectories: {played} begun, {played} trained on, 0 lost, 0 doubled\n" in output
    [connections] = re.findall(
        r"^connections of .*: (\d+) to the gateway, (\d+) to the relay, (\d+) others$", output, re.M
    )
    to_gateway, to_relay, others = map(int, connections)
    assert to_gateway > 0 and to_relay > 0 and others == 0
    assert re.search(r"^users .*: \d+ of \d+ requests \(.* at 95 % confidence\)$", output, re.MULTILINE)


def test_an_example_that_is_stopped_ends_everything_it_started(example, tmp_path):
    first = next((line for line in example.stdout if line.startswith("version 0-")), None)
    if first is None:
        skip_if_not_here(example.wait(), example.stderr.read())
    assert first is not None, example.stderr.read()
    assert processes_with(f"{MARK}={tmp_path}"), "there is something to end"
    os.killpg(example.pid, signal.SIGINT)  # as Ctrl-C does
    output, errors = example.communicate()
    assert example.returncode == 130, errors
    assert "everything that was started ends" in output


def test_without_root_it_says_what_it_needs(tmp_path):
    script = devices.ROOT / "examples" / "two_clusters.sh"
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run([str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == NOT_HERE and ended.stdout == ""
    assert "needs root" in ended.stderr or "not installed" in ended.stderr
