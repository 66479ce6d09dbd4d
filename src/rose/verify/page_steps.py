"""Steps on the pool of KV pages alone, without an engine: the calls of the driver, a killed owner, a burst of serving.

On a GPU the pages are the device's own, made and mapped by the CUDA driver; on a CPU device they are host memory. The
borrower is a process of its own, as a rollout engine is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from rose.device.kv_pool.backends import PageBackend
from rose.device.kv_pool.exchange import create_pool
from rose.device.kv_pool.ledger import PageLedger
from rose.device.kv_pool.pool_share import PoolShare
from rose.errors import Unavailable
from rose.load.statistics import percentile
from rose.observe.intervals import percentile_interval
from rose.verify.kit_results import KitSettings
from rose.verify.machine_facts import gpu_index
from rose.verify.page_contents import PageContents
from rose.verify.replays import add_served, replay
from rose.verify.step_context import StepContext, StepFindings
from rose.vllm.discovery import own_folder

PAGES = 64
MIB = 1 << 20
ROUNDS = 5  # of every call on every page
BUSY_PART, CALLS_MAX = 8, 20_000  # of the requests of a replay; calls of each kind beside them
BORROWED_SHARE, BURST_SHARE = 0.7, 0.5
BURSTS = 20
HAND_OVER_MS_MAX = 100.0  # a user should not notice that memory has moved
ANSWER_S = 30.0
POLL_S = 0.0005


class Borrower:
    """A borrowing process, by the lines that it obeys."""

    def __init__(self, folder: Path, device: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rose.verify.pool_borrower", str(folder), str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def begin(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n".encode())
        self.process.stdin.flush()

    async def answer(self) -> list[str]:
        """Return the words of its next line. Raises Unavailable if it ended or does not answer."""
        assert self.process.stdout is not None
        async with asyncio.timeout(ANSWER_S):
            line = await asyncio.to_thread(self.process.stdout.readline)
        if not line:
            raise Unavailable("the borrowing process ended")
        return line.decode().split()

    async def call(self, order: str) -> int:
        """Give an order and return how many pages it then holds."""
        self.begin(order)
        return int((await self.answer())[1])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class PoolUnderTest:
    """A pool that this process made as the serving engine, and its own share of it."""

    def __init__(self, folder: Path, settings: KitSettings, pages: int = PAGES) -> None:
        kind, device = pool_kind(settings)
        self.folder, self.device = folder, device
        began_s = time.monotonic()
        self.ledger, self.backend, self._server = create_pool(folder, pages, kind, device=device)
        self.made_s = time.monotonic() - began_s
        self.share = PoolShare(self.ledger, self.backend, pages)
        self.contents = PageContents(kind, device)

    def close(self) -> None:
        self.share.close()
        self.contents.close()
        self._server.close()
        self.backend.close()
        self.ledger.close()


def pool_kind(settings: KitSettings) -> tuple[str, int]:
    """Return the back end for a device, and the number of the GPU."""
    return ("memfd", 0) if settings.is_cpu else ("cuda", gpu_index(settings))


@asynccontextmanager
async def pool(context: StepContext) -> AsyncIterator[PoolUnderTest]:
    """Yield a fresh pool, and close it afterwards."""
    with tempfile.TemporaryDirectory(prefix="pool-", dir=own_folder()) as folder:
        made = PoolUnderTest(Path(folder), context.settings)
        try:
            size = made.backend.page_bytes / MIB
            context.findings.fact("pool", f"{PAGES} pages of {size:g} MiB, {made.backend.kind}")
            yield made
        finally:
            made.close()


@asynccontextmanager
async def borrower(under_test: PoolUnderTest) -> AsyncIterator[tuple[Borrower, float]]:
    """Yield a process that has joined, and the seconds that joining took."""
    process = Borrower(under_test.folder, under_test.device)
    try:
        yield process, float((await process.answer())[2])
    finally:
        process.close()


async def page_calls(context: StepContext) -> None:
    """Time every call that moves pages, one page at a time."""
    findings = context.findings
    async with pool(context) as under_test:
        findings.figure("make a page", 1e6 * under_test.made_s / PAGES, "us", PAGES)
        async with borrower(under_test) as (_, joined_s):
            findings.figure("hand a page to another process, once", 1e6 * joined_s / PAGES, "us", PAGES)
        times: dict[str, list[float]] = defaultdict(list)
        for _ in range(ROUNDS):
            _time_calls(under_test.backend, times)
        for name, values in times.items():
            add_times(findings, name, values)
        async with borrower(under_test) as (process, _):
            taken = await process.call(f"take {PAGES}")
            findings.check("the other process can map every page", taken == PAGES, f"{taken} of {PAGES}")
            findings.check("a page that it holds is not free here", under_test.ledger.free_count() == 0)
            left = await process.call(f"give {PAGES}")
            findings.check("it can give every page back", left == 0 and under_test.ledger.free_count() == PAGES)


async def page_calls_busy(context: StepContext) -> None:
    """Time the same calls while users are served by the device, and look at what users see of it."""
    serving, settings = await context.lab.serving(), context.settings
    times: dict[str, list[float]] = defaultdict(list)
    has_ended = threading.Event()
    async with pool(context) as under_test:
        calling = asyncio.create_task(asyncio.to_thread(_time_until, has_ended, under_test.backend, times))
        try:
            records = await replay(serving.url, settings, max(1, settings.requests // BUSY_PART))
        finally:
            has_ended.set()
            await calling
    for name, values in times.items():
        add_times(context.findings, name, values)
    add_served(context.findings, records, settings)


def _time_until(has_ended: threading.Event, backend: PageBackend, times_us: dict[str, list[float]]) -> None:
    while not has_ended.is_set() and len(times_us["map"]) < CALLS_MAX:
        _time_calls(backend, times_us)


def _time_calls(backend: PageBackend, times_us: dict[str, list[float]]) -> None:
    """Add the microseconds of each call on every page; no other process has the pages during this."""
    for number in range(backend.descriptors):
        os.close(_timed(times_us["export"], lambda number=number: backend.export(number)))  # type: ignore[misc]
    address = _timed(times_us["reserve addresses"], lambda: backend.reserve(PAGES))
    for page in range(PAGES):
        place = address + page * backend.page_bytes
        _timed(times_us["map"], lambda place=place, page=page: backend.map(place, page))  # type: ignore[misc]
        _timed(times_us["wipe"], lambda place=place: _wipe(backend, place))  # type: ignore[misc]
        _timed(times_us["wait for the device"], backend.settle)
        _timed(times_us["unmap"], lambda place=place: backend.unmap(place))  # type: ignore[misc]
    backend.free(address, PAGES)


def _wipe(backend: PageBackend, place: int) -> None:
    backend.wipe(place)
    backend.wait_wiped()


def _timed(times_us: list[float], call: Callable[[], int | None]) -> int:
    began_s = time.perf_counter()
    result = call()
    times_us.append(1e6 * (time.perf_counter() - began_s))
    return result or 0


def add_times(findings: StepFindings, name: str, values: list[float], unit: str = "us") -> None:
    """Add the median and the tail of a list of times."""
    tail = 99 if len(values) >= 300 else 95
    for percent in (50, tail):
        interval = percentile_interval(values, percent)
        findings.figure(f"{name} P{percent}", percentile(values, percent), unit, len(values), interval)


async def page_owner_killed(context: StepContext) -> None:
    """Stop, then kill a process that holds most pages: serving gets what is free at once, and the rest at its death."""
    findings, held = context.findings, int(BORROWED_SHARE * PAGES)
    async with pool(context) as under_test, borrower(under_test) as (process, _):
        ledger, share = under_test.ledger, under_test.share
        await process.call(f"take {held}")
        await process.call(f"fill {held}")
        os.kill(process.process.pid, signal.SIGSTOP)
        taken = share.acquire(range(PAGES))
        findings.check(
            "beside a stopped process serving gets every free page", len(taken) == PAGES - held, _pages(taken)
        )
        began_s = time.monotonic()
        process.process.kill()
        await _until_free(ledger, held, began_s)
        findings.figure(f"from kill -9 until its {held} pages are free", 1e3 * (time.monotonic() - began_s), "ms", 1)
        rest = share.acquire([place for place in range(PAGES) if not share.has(place)])
        findings.figure("until serving has mapped and wiped them", 1e3 * (time.monotonic() - began_s), "ms", 1)
        findings.check("serving has every page of the killed process", len(rest) == held, _pages(rest))
        left = [place for place in range(PAGES) if not _is_zero(under_test, place)]
        findings.check(
            "every page is zero: nothing of the killed process is left", not left, _pages(left) if left else ""
        )
        findings.check("no page is held by another process", set(ledger.owners().values()) == {os.getpid()})


def _is_zero(under_test: PoolUnderTest, place: int) -> bool:
    size = under_test.share.page_bytes
    return under_test.contents.is_zero(under_test.share.address + place * size, size)


async def _until_free(ledger: PageLedger, pages: int, began_s: float) -> None:
    while ledger.free_count() < pages:
        if time.monotonic() - began_s > ANSWER_S:
            raise Unavailable(f"the pages of a killed process were not free within {ANSWER_S:g} s")
        await asyncio.sleep(POLL_S)


def _pages(pages: Iterable[int]) -> str:
    return f"{len(list(pages))} of {PAGES} pages"


async def page_burst(context: StepContext) -> None:
    """Let serving need half of the pool while a borrower holds 70 %, again and again."""
    findings, held, needed = context.findings, int(BORROWED_SHARE * PAGES), int(BURST_SHARE * PAGES)
    times_ms, served = [], 0
    async with pool(context) as under_test, borrower(under_test) as (process, _):
        share = under_test.share
        for _ in range(BURSTS):
            await process.call(f"take {held}")
            times_ms.append(1e3 * await _burst(under_test, process, held, needed))
            served += share.held == needed
            share.give_back([place for place in range(PAGES) if share.has(place)])
            await process.call(f"give {PAGES}")
    add_times(findings, f"until serving has {needed} pages", times_ms, "ms")
    findings.check("serving had its pages after every burst", served == BURSTS, f"{served} of {BURSTS}")
    median = statistics.median(times_ms)
    findings.check(f"the median is under {HAND_OVER_MS_MAX:g} ms", median < HAND_OVER_MS_MAX, f"{median:.2f} ms")


async def _burst(under_test: PoolUnderTest, process: Borrower, held: int, needed: int) -> float:
    """Take what is free, have the borrower give the rest, and return the seconds until serving has all of it."""
    share, began_s = under_test.share, time.monotonic()
    process.begin(f"give {held - (PAGES - needed)}")
    while share.held < needed:
        if time.monotonic() - began_s > ANSWER_S:
            raise Unavailable(f"serving had only {share.held} of {needed} pages after {ANSWER_S:g} s")
        empty = [place for place in range(PAGES) if not share.has(place)]
        share.acquire(empty[: needed - share.held])
        await asyncio.sleep(0)
    seconds = time.monotonic() - began_s
    await process.answer()
    return seconds
