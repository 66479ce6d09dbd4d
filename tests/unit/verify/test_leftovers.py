"""Every process of a kit is found and ended, also one in a session of its own that hides its environment."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from rose.verify.leftovers import end_processes, marked_environment, processes_of

WAIT_S = 20.0
NESTED = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); print('up', flush=True)"


@pytest.fixture
def mark():
    mark = os.urandom(8).hex()
    yield mark
    end_processes(mark)


def started(mark):
    """A process that has ended, and the process that it left."""
    environment = {**os.environ, **marked_environment(mark)}
    command = [sys.executable, "-c", NESTED]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=WAIT_S)
    return processes_of(mark)


def test_a_process_whose_parent_has_ended_is_found_by_its_mark(mark):
    assert len(started(mark)) == 1
    assert processes_of(os.urandom(8).hex()) == set()


def test_marked_processes_are_ended(mark):
    assert started(mark) != set()
    assert end_processes(mark) == set() and processes_of(mark) == set()


def test_descendants_are_found_without_a_mark():
    child = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
    try:
        deadline_s = time.monotonic() + WAIT_S
        while len(processes_of("no-such-mark", child.pid)) < 1 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert len(processes_of("no-such-mark", child.pid)) == 1
        assert end_processes("no-such-mark", child.pid) == set()
    finally:
        child.kill()
        child.wait()


def test_this_process_is_never_among_them(monkeypatch, mark):
    assert os.getpid() not in processes_of(mark, os.getppid())
