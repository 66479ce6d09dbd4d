"""Virtual time jumps exactly to the next timer, is deterministic, and reports deadlocks."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.clock import Deadlock, RealClock, VirtualClock, run_virtual


def test_the_real_clock_is_the_machines_monotonic_clock():
    before_s = time.monotonic()
    now_s = RealClock().now_s()
    assert before_s <= now_s <= time.monotonic()


def test_the_real_clock_sleeps():
    clock = RealClock()

    async def nap() -> float:
        before_s = clock.now_s()
        await clock.sleep_s(0.01)
        return clock.now_s() - before_s

    assert asyncio.run(nap()) >= 0.009


def test_a_virtual_year_passes_at_once():
    clock = VirtualClock(start_s=5.0)
    run_virtual(clock.sleep_s(365 * 86400.0), clock)
    assert clock.now_s() == 5.0 + 365 * 86400.0


@given(st.lists(st.floats(0, 1e9), max_size=20))
def test_sleepers_wake_in_order_and_exactly_on_time(delays_s):
    clock = VirtualClock()
    woken: list[tuple[float, float]] = []

    async def sleeper(delay_s: float) -> None:
        await clock.sleep_s(delay_s)
        woken.append((clock.now_s(), delay_s))

    async def everybody() -> None:
        await asyncio.gather(*map(sleeper, delays_s))

    run_virtual(everybody(), clock)
    assert [delay_s for _, delay_s in woken] == sorted(delays_s)
    assert all(at_s == delay_s for at_s, delay_s in woken)


@given(st.lists(st.floats(0.001, 3), min_size=2, max_size=6))
def test_the_same_coroutine_takes_the_same_turns(periods_s):
    def story() -> list[tuple[int, float]]:
        clock, told = VirtualClock(), []

        async def tick(name: int, period_s: float) -> None:
            while True:
                await clock.sleep_s(period_s)
                told.append((name, clock.now_s()))

        async def main() -> None:
            tasks = [asyncio.create_task(tick(name, period_s)) for name, period_s in enumerate(periods_s)]
            await clock.sleep_s(1.0)
            for task in tasks:
                task.cancel()

        run_virtual(main(), clock)
        return told

    assert story() == story()


def test_timeouts_and_queues_work_in_virtual_time():
    clock = VirtualClock()

    async def main() -> tuple[int, float]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), timeout=30)
        asyncio.get_running_loop().call_later(2.5, queue.put_nowait, 7)
        return await asyncio.wait_for(queue.get(), timeout=30), clock.now_s()

    assert run_virtual(main(), clock) == (7, 32.5)


@pytest.mark.parametrize("now_s", [0.0, 1e-9, 3.0, 1e8])
def test_a_timer_that_is_due_already_runs_without_time_passing(now_s):
    clock = VirtualClock()

    async def main() -> float:
        clock.advance_to(now_s)
        await asyncio.wait_for(_at(now_s), timeout=1)
        return clock.now_s()

    async def _at(when_s: float) -> None:
        done = asyncio.Event()
        asyncio.get_running_loop().call_at(when_s, done.set)
        await done.wait()

    assert run_virtual(main(), clock) == now_s


def test_a_cancelled_timer_does_not_move_time():
    clock = VirtualClock()

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, print).cancel()
        await clock.sleep_s(3.0)

    run_virtual(main(), clock)
    assert clock.now_s() == 3.0


def test_a_deadlock_names_the_waiting_tasks():
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"stands still at 4.0 s(.|\n)*waits_for_nobody"):
        run_virtual(waits_for_nobody(), VirtualClock(start_s=4.0))


def test_what_is_left_running_is_cancelled_in_order():
    clock, cancelled = VirtualClock(), []

    async def lingers(name: str) -> None:
        try:
            await clock.sleep_s(100)
        finally:
            cancelled.append(name)

    async def main() -> str:
        main.tasks = [asyncio.create_task(lingers(name)) for name in "abc"]
        await clock.sleep_s(1)
        return "done"

    assert run_virtual(main(), clock) == "done"
    assert cancelled == ["a", "b", "c"]
    assert clock.now_s() == 1.0


def test_errors_propagate_unchanged():
    async def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(fails(), VirtualClock())


def test_a_virtual_clock_does_not_sleep_in_a_real_loop():
    with pytest.raises(AssertionError, match="run_virtual"):
        asyncio.run(VirtualClock().sleep_s(1))


def test_time_does_not_go_back():
    clock = VirtualClock(start_s=2.0)
    with pytest.raises(AssertionError, match="go back"):
        clock.advance_to(1.0)
