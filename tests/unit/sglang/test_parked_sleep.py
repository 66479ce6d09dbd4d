"""A parked scheduler sleeps until a message or an event; an event that came before it slept is not lost."""

from __future__ import annotations

import os
import select
import threading

from rose.sglang.parked_sleep import ParkedSleep

LONG_S = 60.0


def test_a_message_ends_the_sleep() -> None:
    reader, writer = os.pipe()
    sleep = ParkedSleep(select.poll(), [reader])
    os.write(writer, b"x")
    sleep.sleep(LONG_S)
    assert os.read(reader, 1) == b"x"


def test_an_event_ends_the_sleep_and_counts_once() -> None:
    sleep, events = ParkedSleep(select.poll(), []), threading.Semaphore(0)
    seen: list[int] = []

    def is_due() -> bool:
        events.acquire()
        seen.append(1)
        return True

    sleep.watch(is_due)
    events.release()
    sleep.sleep(LONG_S)
    assert seen == [1]
    sleep.sleep(0.0)  # would end at once all the same
    events.release()
    sleep.sleep(LONG_S)
    assert len(seen) == 2


def test_nothing_is_watched_while_the_scheduler_works() -> None:
    sleep, asked = ParkedSleep(select.poll(), []), threading.Event()

    def is_due() -> bool:
        asked.set()
        return False

    sleep.watch(is_due)
    assert not asked.is_set()
    sleep.sleep(0.0)
