"""The heartbeat counts what the loop's own process did, and nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from tests.fuzz.heartbeat import Heartbeat

LONG_S = 0.4


def spin() -> None:
    until_s = time.thread_time() + LONG_S
    while time.thread_time() < until_s:
        pass


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(LONG_S, lock.release).start()
    lock.acquire()


def measured(act: Callable[[], object]) -> Heartbeat:
    async def whole() -> Heartbeat:
        heartbeat = Heartbeat(100)
        await asyncio.sleep(0.05)
        found = act()
        if asyncio.iscoroutine(found):
            await found
        await asyncio.sleep(0.05)
        heartbeat.close()
        return heartbeat

    return asyncio.run(whole())


@pytest.mark.parametrize("act", [spin, wait_for_a_lock, lambda: time.sleep(LONG_S)], ids=["cpu", "lock", "sleep"])
def test_what_blocks_the_loop_is_counted_with_its_stack(act: Callable[[], object]) -> None:
    found = measured(act)
    assert found.missed() >= 2
    assert any("test_heartbeat.py" in line for block in found.blocks for line in block.stack)


def test_the_watchdog_does_not_hold_what_a_blocked_loop_worked_on() -> None:
    """Else the memory of a large request counts as memory that the server left behind."""

    class Body:
        pass

    held: list[weakref.ref[Body]] = []

    def work() -> None:
        body = Body()
        held.append(weakref.ref(body))
        time.sleep(LONG_S)

    async def is_released() -> bool:
        heartbeat = Heartbeat(100)
        work()
        for _ in range(200):  # the watchdog may be about to format the stack
            await asyncio.sleep(0.01)
            if heartbeat.blocks and held[0]() is None:
                break
        released = held[0]() is None
        heartbeat.close()
        return released

    assert asyncio.run(is_released())


def test_a_loop_that_waits_for_other_work_is_not_blocked() -> None:
    async def other_work() -> None:
        await asyncio.to_thread(time.sleep, LONG_S)

    assert measured(other_work).missed() == 0
