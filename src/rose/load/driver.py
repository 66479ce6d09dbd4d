"""Open-loop load: every request is sent at its own moment, whether or not the ones before it were answered.

A closed loop waits for answers and so goes easy on a slow server, which is how a bad tail stays unseen. Here the
schedule waits for nobody. A bound on requests under way protects this machine's sockets; one that meets the bound
waits in its own task with its clock running, so the wait is in its latency and in the lateness that is reported, and
the schedule goes on. A time-out counts from the scheduled arrival too.

The driver knows nothing of HTTP: it is given an `Exchange`, and a clock that may be virtual.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from rose.clock import Clock
from rose.load.records import Failed, Outcome, Record, Rejected
from rose.load.traces import Trace

TIMEOUT_S = 60.0
RUNNING_MAX = 800  # each is a socket, and a process usually gets 1,024


class Exchange(Protocol):
    async def ask(self, record: Record, now_s: Callable[[], float]) -> None:
        """Send the request and tell `record` of its tokens until the answer ends. Raises Rejected or Failed."""


class OpenLoop:
    """One run. `records` holds what was sent so far and may be read at any time; `on_end` gets each at its end."""

    def __init__(
        self,
        trace: Trace,
        exchange: Exchange,
        clock: Clock,
        *,
        timeout_s: float = TIMEOUT_S,
        running_max: int = RUNNING_MAX,
        on_end: Callable[[Record], object] = lambda record: None,
    ) -> None:
        self.trace = trace
        self.records: list[Record] = []
        self._exchange = exchange
        self._clock = clock
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._began_s = clock.now_s()
        self._places = asyncio.Semaphore(running_max)
        self._stopping = asyncio.Event()
        self._under_way: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return len(self._under_way)

    @property
    def was_stopped(self) -> bool:
        return self._stopping.is_set()

    def now_s(self) -> float:
        """Since the start of the run."""
        return self._clock.now_s() - self._began_s

    async def run(self) -> list[Record]:
        """Until every request has ended, or `stop`."""
        self._began_s = self._clock.now_s()
        columns = (self.trace.arrival_s, self.trace.prompt_tokens, self.trace.output_tokens)
        async with asyncio.TaskGroup() as tasks:
            for index, (arrival_s, prompt, output) in enumerate(zip(*(column.tolist() for column in columns))):
                await self._wait_until(arrival_s)
                if self.was_stopped:
                    break
                self._send(tasks, Record(index, arrival_s, prompt, output))
        return self.records

    def stop(self) -> None:
        """Send nothing more and give up what is under way; `run` then returns."""
        self._stopping.set()
        for task in self._under_way:
            task.cancel()

    async def _wait_until(self, moment_s: float) -> None:
        due_s = self._began_s + moment_s  # absolute, so that what is left cannot round to a time that never comes
        while (left_s := due_s - self._clock.now_s()) > 0 and not self.was_stopped:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._stopping.wait()

    def _send(self, tasks: asyncio.TaskGroup, record: Record) -> None:
        self.records.append(record)
        task = tasks.create_task(self._follow(record))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _follow(self, record: Record) -> None:
        """One request to its end. Only a bug leaves this with an exception, and then ends the run."""
        try:
            async with asyncio.timeout(record.scheduled_s + self._timeout_s - self.now_s()):
                await self._ask(record)
            record.outcome = Outcome.DONE
        except TimeoutError:
            record.outcome = Outcome.TIMED_OUT
        except (Rejected, Failed) as error:
            record.outcome = Outcome.REJECTED if isinstance(error, Rejected) else Outcome.FAILED
            record.detail = str(error)
        except asyncio.CancelledError:
            if not self.was_stopped:
                raise
            record.outcome = Outcome.CUT
        record.ended_s = self.now_s()
        self._on_end(record)

    async def _ask(self, record: Record) -> None:
        record.was_held = self._places.locked()
        async with self._places:
            record.sent_s = self.now_s()
            await self._exchange.ask(record, self.now_s)
