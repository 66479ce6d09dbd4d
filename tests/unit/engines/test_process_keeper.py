"""Restarts: pauses that double, limits, and child processes that end within their grace."""

from __future__ import annotations

import asyncio
import subprocess
import time

import pytest
from tests.in_loop import in_loop

from rose.engines import process_keeper
from rose.engines.process_keeper import ChildProcess, RestartCounter, RestartPolicy, keep_running

POLICY = RestartPolicy(pause_first_s=1.0, pause_longest_s=5.0, healthy_s=60.0, deaths_max=6)


def test_the_pause_doubles_up_to_the_longest_and_then_it_gives_up() -> None:
    counter = RestartCounter(POLICY)
    assert [counter.pause_after(0.1) for _ in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_a_healthy_run_starts_a_new_count() -> None:
    counter = RestartCounter(POLICY)
    for _ in range(4):
        counter.pause_after(0.1)
    assert counter.is_quick(59.9) and not counter.is_quick(60.0)
    assert counter.pause_after(60.0) == 1.0 and counter.deaths == 1
    assert [counter.pause_after(0.1) for _ in range(5)][-1] is None


def test_a_death_that_does_not_count_lengthens_the_pause_only() -> None:
    counter = RestartCounter(POLICY)
    pauses = [counter.pause_after(0.1, counts=False) for _ in range(100)]
    assert pauses[:4] == [1.0, 2.0, 4.0, 5.0] and None not in pauses
    assert counter.pause_after(0.1) == 5.0


@in_loop
async def test_it_runs_again_until_a_run_ends_without_a_reason() -> None:
    reasons = iter(["first", "second", ""])
    ends: list[tuple[str, float]] = []

    async def run_once() -> str:
        return next(reasons)

    policy = RestartPolicy(0.001, 0.002, healthy_s=60.0)
    assert await keep_running(run_once, policy, lambda reason, pause_s: ends.append((reason, pause_s))) == ""
    assert ends == [("first", 0.001), ("second", 0.002)]


@in_loop
async def test_it_gives_up_after_quick_deaths_and_returns_the_last_reason() -> None:
    runs = 0

    async def run_once() -> str:
        nonlocal runs
        runs += 1
        return f"death {runs}"

    policy = RestartPolicy(0.0, 0.0, healthy_s=60.0, deaths_max=3)
    assert await keep_running(run_once, policy, lambda *_: None) == "death 3"


def child(program: str, *, is_group: bool = False) -> ChildProcess:
    process = subprocess.Popen(["sh", "-c", program], start_new_session=is_group, stdout=subprocess.DEVNULL)
    return ChildProcess(process, "the child", is_group=is_group)


@in_loop
async def test_the_reason_of_an_end_is_its_code_or_its_signal() -> None:
    assert await child("exit 3").exit_reason(10.0) == "the child left with code 3"
    killed = child("exec sleep 60")
    assert killed.is_running and killed.process_id > 0
    killed.kill()
    assert await killed.exit_reason(10.0) == "the child was killed by signal 9"
    assert not killed.is_running
    killed.kill()  # once more does nothing


@in_loop
async def test_a_child_that_does_not_end_in_time_is_killed() -> None:
    stubborn = child("trap '' TERM; while :; do sleep 0.05; done")
    begin_s = time.monotonic()
    await stubborn.stop(0.3)
    assert not stubborn.is_running and time.monotonic() - begin_s < 10.0
    assert await child("exec sleep 60").exit_reason(0.1) == "the child was killed by signal 9"


@in_loop
async def test_stopping_ends_the_whole_process_group() -> None:
    group = child("sleep 60 & wait", is_group=True)
    members = ["pgrep", "-g", str(group.process_id)]
    async with asyncio.timeout(10.0):
        while len(subprocess.run(members, capture_output=True, check=False).stdout.split()) < 2:
            await asyncio.sleep(0.02)
        await group.stop(5.0)
        while subprocess.run(members, capture_output=True, check=False).stdout.split():
            await asyncio.sleep(0.02)
    assert not group.is_running


@in_loop
async def test_the_end_is_awaited_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_keeper, "POLL_S", 0.01)
    short = child("sleep 0.1")
    async with asyncio.timeout(10.0):
        await short.ended()
    assert not short.is_running
