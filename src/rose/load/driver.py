"""Open-loop load: every request is sent at its own moment, whether or not the ones before it were answered.

A closed loop waits for answers and so goes easy on a slow server, which is how a bad tail stays unseen. Here the
schedule never waits. A bound on requests under way protects this machine's sockets; one that meets the bound
waits in its own task with its clock running, so the wait is in its latency and in the lateness that is reported, and
the schedule goes on. A time-out counts from the scheduled arrival too.

The driver knows nothing of HTTP: it is given an `Exchange`, and a clock that may be virtual. A record has one time
stamp for every token, in seconds from the start of the run. Tokens of one event reach the client at the same moment:
the gaps between them are 0, and the gap before them is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rose.clock import Clock
from rose.load.traces import Trace

TIMEOUT_S = 60.0
RUNNING_MAX = 800  # each is a socket, and a process usually gets 1,024


class RequestOutcome(StrEnum):
    DONE = "done"
    REJECTED = "rejected"  # the server answered 429 or 503
    TIMED_OUT = "timed_out"
    FAILED = "failed"  # anything else that went wrong
    CUT = "cut"  # the run was stopped while it was under way


class Rejected(Exception):
    """A refusal of a busy server."""


class RequestFailed(Exception):
    """A failure of a request for another reason."""


@dataclass(slots=True)
class Record:
    """One request. Its latency begins at `scheduled_s`, when it should have been sent."""

    index: int
    scheduled_s: float
    prompt_tokens: int
    wanted_tokens: int
    sent_s: float = math.nan
    ended_s: float = math.nan
    token_s: array[float] = field(default_factory=lambda: array("d"))
    tokens_counted: int = 0  # by the server, when it does not send one event per token
    outcome: RequestOutcome | None = None
    detail: str = ""
    was_held: bool = False  # it waited for one of the places that bound how many run at once

    def saw(self, tokens: int, now_s: float) -> None:
        self.token_s.extend([now_s] * tokens)

    @property
    def tokens(self) -> int:
        return max(len(self.token_s), self.tokens_counted)


class Exchange(Protocol):
    async def ask(self, record: Record, now_s: Callable[[], float]) -> None:
        """Send the request and stamp its tokens in `record` until the answer ends. Raises Rejected or RequestFailed."""


class OpenLoop:
    """One run. `records` holds the requests sent so far and may be read at any time; `on_end` gets each at its end."""

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
        """Return the seconds since the start of the run."""
        return self._clock.now_s() - self._began_s

    async def run(self) -> list[Record]:
        """Send every request at its moment; return when all have ended, or after `stop`."""
        self._began_s = self._clock.now_s()
        columns = (self.trace.arrival_s, self.trace.prompt_tokens, self.trace.output_tokens)
        async with asyncio.TaskGroup() as tasks:
            for index, (arrival_s, prompt, output) in enumerate(zip(*(column.tolist() for column in columns))):
                await self._wait_until(arrival_s)
                if self.was_stopped:
                    break
                record = Record(index, arrival_s, prompt, output)
                self.records.append(record)
                task = tasks.create_task(self._follow(record))
                self._under_way.add(task)
                task.add_done_callback(self._under_way.discard)
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

    async def _follow(self, record: Record) -> None:
        """Follow one request to its end. Only a bug leaves this with an exception, which then ends the run."""
        try:
            async with asyncio.timeout(record.scheduled_s + self._timeout_s - self.now_s()):
                record.was_held = self._places.locked()
                async with self._places:
                    record.sent_s = self.now_s()
                    await self._exchange.ask(record, self.now_s)
            record.outcome = RequestOutcome.DONE
        except TimeoutError:
            record.outcome = RequestOutcome.TIMED_OUT
        except (Rejected, RequestFailed) as error:
            record.outcome = RequestOutcome.REJECTED if isinstance(error, Rejected) else RequestOutcome.FAILED
            record.detail = str(error)
        except asyncio.CancelledError:
            if not self.was_stopped:
                raise
            record.outcome = RequestOutcome.CUT
        record.ended_s = self.now_s()
        self._on_end(record)
