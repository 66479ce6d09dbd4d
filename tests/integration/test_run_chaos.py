"""A run in which one process after the other is killed or stopped for a while: it goes on, and nothing is lost.

What a run starts itself and starts again (devices, gateway) is killed in `test_run`; here are the processes inside a
device, engines and agents, and processes that hang instead of dying: SIGSTOP, and SIGCONT some seconds later.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.integration.devices import eventually
from tests.integration.running import Run, kill, processes_of
from tests.integration.test_run import model, runs, started

__all__ = ["model", "runs"]

STEPS, GROUPS, SIZE = 10, 4, 8
LEASE_S = 5.0  # the gateway's: who is silent for longer has lost its turns
JOB = (f"steps={STEPS}", f"groups.groups={GROUPS}", f"groups.size={SIZE}", "evaluation.every_steps=0")


def front_of(run: Run, role: str) -> int:
    """On a dedicated device it is the agent's process, too."""
    [found] = processes_of(run.processes(), f"rose serve .*--worker-name {role}")
    return found


def agent_of_borrowed(run: Run) -> int:
    [found] = processes_of(run.processes(), rf"rose\.device\.rollout_front {front_of(run, 'borrowed')}")
    return found


def agent_of_dedicated(run: Run) -> int:
    return front_of(run, "dedicated")


def engine_of_borrowed(run: Run) -> int:
    [found] = processes_of(run.processes(), rf"rose\.device\.executor \d+ {front_of(run, 'borrowed')}\b")
    return found


def engine_of_dedicated(run: Run) -> int:
    [found] = processes_of(run.processes(), rf"rose\.device\.executor \d+ {front_of(run, 'dedicated')}\b")
    return found


def gateway(run: Run) -> int:
    [found] = processes_of(run.processes(), "rose gateway")
    return found


@contextmanager
def stopped(process_id: int) -> Iterator[None]:
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def is_back(run: Run, find: Callable[[Run], int], killed: int) -> bool:
    try:
        return find(run) != killed
    except ValueError:  # none is there, for the moment
        return False


def steps_done(run: Run) -> int:
    return len(run.metrics("step"))


def check(run: Run) -> None:
    assert run.wait(300) == 0, run.words
    summary = run.summary()
    assert summary["steps"] == STEPS and summary["begun"] == summary["returned"] == STEPS * GROUPS * SIZE
    assert (summary["lost"], summary["doubled"], summary["differing"]) == (0, 0, 0)
    [weights] = run.metrics("weights")
    assert set(weights["workers"].values()) == {weights["hash"]}, "all run the trainer's weights in the end"


@pytest.mark.slow
@pytest.mark.parametrize("find", [engine_of_borrowed, engine_of_dedicated, agent_of_borrowed])
def test_killed_inside_a_device(tmp_path: Path, model: Path, runs: list[Run], find: Callable[[Run], int]) -> None:
    run = started(runs, tmp_path, model, *JOB)
    run.until_said(rf"step +2/{STEPS}")
    killed = find(run)
    kill(killed)
    eventually(lambda: run.process.poll() is not None or is_back(run, find, killed))
    check(run)
    assert run.summary()["restarts"] == 0, "the device mended itself"


@pytest.mark.slow
@pytest.mark.parametrize(
    "find, seconds",
    [
        (gateway, 3.0),
        (agent_of_borrowed, LEASE_S + 2.0),
        (agent_of_dedicated, LEASE_S + 2.0),
        (engine_of_borrowed, 3.0),
        (engine_of_dedicated, LEASE_S + 2.0),
    ],
)
def test_stopped_for_a_while(
    tmp_path: Path, model: Path, runs: list[Run], find: Callable[[Run], int], seconds: float
) -> None:
    run = started(runs, tmp_path, model, *JOB)
    run.until_said(rf"step +2/{STEPS}")
    with stopped(find(run)):
        time.sleep(seconds)  # what hangs for so long is the point
        done = steps_done(run)
    eventually(lambda: run.process.poll() is not None or steps_done(run) > done)
    check(run)
