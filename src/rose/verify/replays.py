"""Open-loop load on the serving engine, and its figures with their intervals.

Every replay of a kit sends the same seeded requests at the same moments. Latency counts from the scheduled arrival.
P99 needs 1,000 requests; under that the tail is P95, and the figure's name says so.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from numpy.typing import NDArray

from rose.clock import RealClock
from rose.load.client import HttpExchange, find_server, open_session
from rose.load.driver import OpenLoop, Record, RequestOutcome
from rose.load.generators import generated
from rose.load.load_report import LatencyBudget, Measures, measure, seen
from rose.load.statistics import percentile
from rose.load.traces import fitted
from rose.observe.intervals import percentile_interval, share_interval
from rose.verify.kit_results import KitSettings
from rose.verify.step_context import StepFindings

LEARNING_SEED = 7919  # of traffic that is not measured: other requests, at other moments
PERCENT = 100.0


def budget_of(settings: KitSettings) -> LatencyBudget:
    return LatencyBudget(settings.ttft_ms / 1e3, settings.tpot_ms / 1e3)


@asynccontextmanager
async def load_loop(url: str, settings: KitSettings, requests: int, seed: int | None = None) -> AsyncIterator[OpenLoop]:
    """Yield a loop that sends so many requests when it is run."""
    seed = settings.seed if seed is None else seed
    async with open_session() as session:
        server = await find_server(session, url, seed=seed)
        trace = generated(f"poisson:rate={settings.rate_rps:g}", seed=seed, requests=requests)
        yield OpenLoop(fitted(trace, server.context_tokens), HttpExchange(session, server), RealClock())


async def replay(url: str, settings: KitSettings, requests: int | None = None) -> list[Record]:
    """Send the kit's requests and return what came of each."""
    async with load_loop(url, settings, settings.requests if requests is None else requests) as loop:
        return await loop.run()


@asynccontextmanager
async def background_load(url: str, settings: KitSettings, requests: int) -> AsyncIterator[asyncio.Task[list[Record]]]:
    """Send requests meanwhile; the task returns their records. What is under way at the end of the block is cut."""
    async with load_loop(url, settings, requests, LEARNING_SEED) as loop:
        task = asyncio.create_task(loop.run())
        try:
            yield task
        finally:
            loop.stop()
            await asyncio.gather(task, return_exceptions=True)


def add_served(findings: StepFindings, records: Sequence[Record], settings: KitSettings, suffix: str = "") -> int:
    """Add the figures of a replay, and that every request was answered. Return how many attained the budgets."""
    measures = measure(records, budget_of(settings))
    verdicts = seen(measures.attained)
    attained, count = int(verdicts.sum()), int(verdicts.size)
    low, high = share_interval(attained, count)
    share = PERCENT * attained / count if count else None
    findings.figure(f"attainment{suffix}", share, "%", count, (PERCENT * low, PERCENT * high))
    for name, values in _latencies(measures):
        if values.size:
            tail = 99 if values.size >= 1000 else 95
            for percent in (50, tail):
                value = percentile(values, percent)
                interval = percentile_interval(values.tolist(), percent)
                findings.figure(f"{name} P{percent}{suffix}", value, "ms", int(values.size), interval)
    add_answered(findings, records, suffix)
    return attained


def add_answered(findings: StepFindings, records: Sequence[Record], suffix: str = "") -> None:
    """Check that the serving engine answered every request, in whatever time."""
    done = sum(record.outcome is RequestOutcome.DONE for record in records)
    wrong = Counter(f"{record.outcome}: {record.detail}".rstrip(": ") for record in records if record.outcome != "done")
    what = "; ".join(f"{number} x {text}" for text, number in wrong.most_common(3))
    findings.check(
        f"serving answered every request{suffix}",
        done == len(records) > 0,
        f"{done:,} of {len(records):,}; {what}".rstrip("; "),
    )


def _latencies(measures: Measures) -> list[tuple[str, NDArray[np.float64]]]:
    """Return the known latencies in milliseconds."""
    named = (("TTFT", measures.ttft_s), ("TPOT", measures.tpot_s), ("gap between tokens", measures.gap_s))
    return [(name, 1e3 * seen(values)) for name, values in named]
