"""Steps that break the rollout side: users are served all the time, and what broke is looked at afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from array import array

import pytest

from rose.errors import Unavailable
from rose.load.driver import Record, RequestOutcome
from rose.verify import failure_steps
from rose.verify.kit_results import KitSettings
from rose.verify.step_context import StepContext

WAIT_S = 20.0


class FakeServing:
    """A serving engine with an answer that may change."""

    url, is_running = "http://127.0.0.1:1", True

    def __init__(self, answers):
        self.answers = list(answers)

    async def greedy(self, prompt, tokens):
        return self.answers.pop(0)


@pytest.fixture
def context(tmp_path):
    return StepContext(KitSettings(device="cpu:0"), tmp_path, None, {}, print)  # type: ignore[arg-type]


@pytest.fixture
def replays(monkeypatch):
    """Count the replays; every request of them is answered."""
    counts = []

    async def replay(url, settings, requests):
        counts.append(requests)
        await asyncio.sleep(0.01)
        return [
            Record(index, 0.1, 5, 2, 0.1, 0.3, array("d", [0.2, 0.3]), outcome=RequestOutcome.DONE)
            for index in range(requests)
        ]

    monkeypatch.setattr(failure_steps, "replay", replay)
    return counts


def test_users_are_served_before_during_and_after(context, replays):
    async def action():
        await asyncio.sleep(0.05)
        return 1.5

    serving = FakeServing([(1, 2), (1, 2)])
    assert asyncio.run(failure_steps.under_load(context, serving, action)) == 1.5
    assert len(replays) >= 4 and context.findings.result("x", 1.0).outcome == "passed"


def test_other_tokens_afterwards_fail_the_step(context, replays):
    async def action():
        return 0.0

    asyncio.run(failure_steps.under_load(context, FakeServing([(1, 2), (1, 3)]), action))
    assert "greedy tokens" in context.findings.result("x", 1.0).reason


def test_an_action_that_fails_ends_the_load(context, replays):
    async def action():
        raise Unavailable("it did not come back")

    with pytest.raises(Unavailable, match="did not come back"):
        asyncio.run(failure_steps.under_load(context, FakeServing([(1,), (1,)]), action))


def test_a_group_lives_until_its_last_process_is_gone():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        assert failure_steps.group_lives(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        assert failure_steps.group_lives(process.pid)
        process.kill()
        deadline_s = time.monotonic() + WAIT_S
        while failure_steps.group_lives(process.pid) and time.monotonic() < deadline_s:
            time.sleep(0.01)  # a zombie now, which is gone
        assert not failure_steps.group_lives(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("line, is_group", [("group 4321", True), ("rose: no model", False), ("", False)])
def test_an_agent_that_says_no_group_did_not_start(line, is_group):
    agent = subprocess.Popen(["echo", line], stdout=subprocess.PIPE)
    if is_group:
        assert asyncio.run(failure_steps._group_of(agent)) == 4321
    else:
        with pytest.raises(Unavailable, match="did not start"):
            asyncio.run(failure_steps._group_of(agent))
    agent.communicate()
