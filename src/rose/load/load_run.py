"""One run from beginning to end: find the server, fit the trace to it, send it, and gather what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rose import __version__
from rose.clock import RealClock
from rose.load.client import HttpExchange, Server, find_server, open_session
from rose.load.driver import RUNNING_MAX, TIMEOUT_S, OpenLoop, Record
from rose.load.harvest import Harvest, look, watch
from rose.load.load_report import LatencyBudget, measure, report_of, request_columns
from rose.load.terminal import LoadProgress
from rose.load.traces import Lengths, Trace, fitted


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The settings of a run. None stands for what the server or the trace says."""

    url: str
    budget: LatencyBudget = field(default_factory=LatencyBudget)
    model: str | None = None
    context_tokens: int | None = None
    vocabulary: int | None = None
    lengths: Lengths = "shrink"
    start_s: float = 0.0
    duration_s: float | None = None
    rate_scale: float = 1.0
    requests: int | None = None
    timeout_s: float = TIMEOUT_S
    running_max: int = RUNNING_MAX
    metrics_url: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that has ended, by itself or because it was stopped."""

    plan: LoadPlan
    server: Server
    trace: Trace
    records: list[Record]
    duration_s: float
    harvest: Harvest
    was_stopped: bool

    def report(self) -> dict[str, Any]:
        """Return the figures under flat keys."""
        harvested = {"harvested_tokens": self.harvest.total, "harvested_tok_s": self.harvest.tokens_per_s}
        return report_of(self.records, self.plan.budget, self.duration_s) | harvested

    def document(self, command: str) -> dict[str, Any]:
        """Return everything about the run for a JSON file: the plan, what was sent, the results."""
        measures = measure(self.records, self.plan.budget)
        return {
            "rose": __version__,
            "command": command,
            "plan": asdict(self.plan),
            "server": asdict(self.server),
            "trace": self.trace.facts(),
            "was_stopped": self.was_stopped,
            **self.report(),
            "harvest": asdict(self.harvest),
            "request_rows": request_columns(self.records, measures),
        }


async def run_load(
    trace: Trace,
    plan: LoadPlan,
    *,
    api_key: str | None = None,
    progress: LoadProgress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> FinishedRun:
    """Send a trace to a server. SIGINT and SIGTERM end the run early and in good order."""
    async with open_session(api_key) as session:
        server = await find_server(
            session,
            plan.url,
            model=plan.model,
            context_tokens=plan.context_tokens,
            vocabulary=plan.vocabulary,
            seed=plan.seed,
        )
        trace = fitted(
            trace,
            server.context_tokens,
            lengths=plan.lengths,
            start_s=plan.start_s,
            duration_s=plan.duration_s,
            rate_scale=plan.rate_scale,
            requests=plan.requests,
        )
        say(_opening(server, trace))
        progress = progress or LoadProgress(plan.budget)
        loop = OpenLoop(
            trace,
            HttpExchange(session, server),
            RealClock(),
            timeout_s=plan.timeout_s,
            running_max=plan.running_max,
            on_end=progress.add,
        )
        harvest, metrics_url = Harvest(), plan.metrics_url or f"{server.url}/metrics"
        with _signals(loop.stop):
            async with _meanwhile(watch(session, metrics_url, loop.now_s, harvest), _show(progress, loop)):
                records = await loop.run()
        duration_s = loop.now_s()
        progress.clear()
        if harvest.tokens:
            await look(session, metrics_url, loop.now_s, harvest)
        return FinishedRun(plan, server, trace, records, duration_s, harvest, loop.was_stopped)


async def _show(progress: LoadProgress, loop: OpenLoop) -> None:
    while True:
        await asyncio.sleep(progress.every_s)
        progress.show(loop)


@contextlib.asynccontextmanager
async def _meanwhile(*others: Any) -> AsyncIterator[None]:
    """Run these meanwhile, and end them with the block. Raises the error of one that failed."""
    tasks = [asyncio.create_task(other) for other in others]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            raise end


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    running = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        running.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            running.remove_signal_handler(number)


def _opening(server: Server, trace: Trace) -> str:
    facts, seconds = trace.facts(), float(trace.arrival_s[-1])
    prompt, output = facts["prompt_tokens"], facts["output_tokens"]
    words = [
        f"{trace.name}: {len(trace):,} requests in {seconds:,.0f} s to {server.model} at {server.url}",
        f"  prompts: P50 {prompt['p50']:,} and P99 {prompt['p99']:,} tokens; "
        f"answers: P50 {output['p50']:,} and P99 {output['p99']:,}",
    ]
    return "\n".join([*words, *(f"  {note}" for note in trace.notes)])
