"""The users of a run: a process that sends traffic to the serving device, and the log of its requests in the run.

    python -m rose.run.serving_traffic    (the plan comes as one JSON object on standard input)

It is a process of its own, so that nothing the run does makes it late. It writes one JSON line per request to standard
output: when the request should have come, on the clock that all processes share, and its outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

import msgspec

from rose.bounds import Count, Finite, Label, Seconds, Serial, Text
from rose.load.driver import OpenLoop, Record
from rose.load.generators import generated
from rose.load.load_report import LatencyBudget, judged
from rose.load.load_run import LoadPlan, run_load
from rose.load.terminal import LoadProgress


class TrafficPlan(msgspec.Struct, frozen=True):
    url: Text
    source: Text
    seed: Serial
    duration_s: Seconds
    ttft_s: Seconds
    tpot_s: Seconds


class UserRequest(msgspec.Struct, frozen=True, tag="served"):
    """One request of a user. Times are milliseconds; None where there is nothing to measure."""

    at_s: Finite  # when it should have come, on the monotonic clock
    outcome: Label
    ttft_ms: Finite | None
    tpot_ms: Finite | None
    attained: bool | None
    prompt_tokens: Count
    output_tokens: Count
    late_ms: Finite


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(UserRequest)
RECENT = 500  # requests that the running attainment is taken over


class ServingLog:
    """Log of users' requests with a running attainment; passes every line on."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.requests = 0
        self._write = write
        self._verdicts: deque[bool] = deque(maxlen=RECENT)

    def add(self, line: bytes) -> None:
        """Add one line of the traffic process."""
        served = _decoder.decode(line)
        if served.outcome == "cut":  # the run ended, not the request
            return
        self.requests += 1
        if served.attained is not None:
            self._verdicts.append(served.attained)
        self._write(line)

    def attainment(self) -> float | None:
        return sum(self._verdicts) / len(self._verdicts) if self._verdicts else None


class RequestWriter(LoadProgress):
    """Progress that writes each request as it ends, in place of the line on a terminal."""

    def __init__(self, budget: LatencyBudget, stream: TextIO) -> None:
        super().__init__(budget, stream)
        self._budget, self._out = budget, stream

    def add(self, record: Record) -> None:
        served = served_of(record, self._budget, time.monotonic() - record.ended_s)
        with contextlib.suppress(OSError):
            self._out.write(_encoder.encode(served).decode() + "\n")
            self._out.flush()

    def show(self, loop: OpenLoop) -> None:
        """Show nothing."""

    def clear(self) -> None:
        """Clear nothing, since nothing was shown."""


def served_of(record: Record, budget: LatencyBudget, began_s: float) -> UserRequest:
    """Return a request as it is recorded; `began_s` is when its times count from, on the shared clock."""
    ttft_s, tpot_s, attained = judged(record, budget)
    late_s = record.sent_s - record.scheduled_s
    return UserRequest(
        at_s=round(began_s + record.scheduled_s, 4),
        outcome=str(record.outcome),
        ttft_ms=_ms(ttft_s),
        tpot_ms=_ms(tpot_s),
        attained=None if math.isnan(attained) else bool(attained),
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.tokens,
        late_ms=_ms(late_s) or 0.0,
    )


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds * 1000, 3)


async def send(plan: TrafficPlan) -> None:
    """Send traffic until stopped; traffic that is over begins again with another seed."""
    budget, seed = LatencyBudget(plan.ttft_s, plan.tpot_s), plan.seed
    while True:
        trace = generated(plan.source, seed=seed, duration_s=plan.duration_s)
        load = LoadPlan(url=plan.url, budget=budget, seed=seed, duration_s=plan.duration_s)
        finished = await run_load(trace, load, progress=RequestWriter(budget, sys.stdout), say=_announce)
        if finished.was_stopped:
            return
        seed += 1


def _announce(opening: str) -> None:
    print(opening, flush=True)
    print("traffic is on", flush=True)


def main() -> int:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=TrafficPlan)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(send(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
