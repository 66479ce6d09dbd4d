"""The users of a run: a process that sends traffic to the serving device and tells of every request that ended.

    python -m rose.launch.traffic    (what to send comes as one JSON object on standard input)

It is a process of its own, so that nothing the run does makes it late. One JSON line per request goes to standard
output: when it should have come, on the clock that all processes share, and what became of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from typing import TextIO

import msgspec

from rose.bounds import Count, Finite, Label, Seconds, Serial, Text
from rose.load.driver import OpenLoop
from rose.load.generators import generated
from rose.load.progress import Progress
from rose.load.records import Record
from rose.load.report import Budget, judged
from rose.load.run import Plan, run_load


class TrafficPlan(msgspec.Struct, frozen=True):
    url: Text
    source: Text
    seed: Serial
    duration_s: Seconds
    ttft_s: Seconds
    tpot_s: Seconds


class Served(msgspec.Struct, frozen=True, tag="served"):
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


class Teller(Progress):
    """In the place of the line that shows a run: tells each request as it ends, and shows nothing."""

    def __init__(self, budget: Budget, stream: TextIO) -> None:
        super().__init__(budget, stream)
        self._judge_by = budget
        self._out = stream

    def add(self, record: Record) -> None:
        served = served_of(record, self._judge_by, time.monotonic() - record.ended_s)
        with contextlib.suppress(OSError):
            self._out.write(_encoder.encode(served).decode() + "\n")
            self._out.flush()

    def show(self, loop: OpenLoop) -> None:
        """Nobody looks here."""

    def clear(self) -> None:
        """Nothing was shown."""


def served_of(record: Record, budget: Budget, began_s: float) -> Served:
    """`began_s` is the moment on the shared clock that the record counts from."""
    ttft_s, tpot_s, attained = judged(record, budget)
    late_s = record.sent_s - record.scheduled_s
    return Served(
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
    """Until stopped; traffic that is over begins again with other dice."""
    budget, seed = Budget(plan.ttft_s, plan.tpot_s), plan.seed
    while True:
        trace = generated(plan.source, seed=seed, duration_s=plan.duration_s)
        load = Plan(url=plan.url, budget=budget, seed=seed, duration_s=plan.duration_s)
        finished = await run_load(trace, load, progress=Teller(budget, sys.stdout), say=_say)
        if finished.was_stopped:
            return
        seed += 1


def _say(words: str) -> None:
    print(words, flush=True)
    print("traffic is on", flush=True)


def main() -> int:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=TrafficPlan)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(send(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
