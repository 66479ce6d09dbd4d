"""One load run against a scripted server: from the plan to the document."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tests.unit.load.test_client import DONE, EVENTS, Scripted, served, tokens

from rose.load.harvest import COUNTER
from rose.load.load_run import FinishedRun, LoadPlan, run_load
from rose.load.terminal import LoadProgress
from rose.load.traces import made_trace


def trace_of(*arrivals_s: float) -> Any:
    count = len(arrivals_s)
    return made_trace("t", np.array(arrivals_s, dtype=float), np.full(count, 10), np.full(count, 2))


def run(script: Scripted, *arrivals_s: float, **plan: Any) -> tuple[FinishedRun, list[str]]:
    lines: list[str] = []

    async def main() -> FinishedRun:
        async with served(script) as url:
            load = LoadPlan(url, **plan)
            progress = LoadProgress(load.budget, io.StringIO())
            return await run_load(trace_of(*arrivals_s), load, progress=progress, say=lines.append)

    return asyncio.run(main()), lines


def test_a_run_is_announced_and_every_request_is_in_its_document():
    script = Scripted()
    script.metrics = [f"{COUNTER} 100\n", f"{COUNTER} 160\n"]
    finished, lines = run(script, 0.0, 0.01, 0.02)
    document = finished.document("rose load")
    assert document["done"] == 3 and document["request_rows"]["outcome"] == ["done"] * 3
    assert document["trace"]["requests"] == 3 and document["server"]["model"] == "m" and not document["was_stopped"]
    assert document["harvested_tokens"] == 60
    [opening] = lines
    assert opening.startswith("t: 3 requests in 0 s to m at http") and "prompts: P50 10" in opening
    assert len(script.bodies) == 4, "the probe is not counted"


def test_a_plan_limits_the_requests_of_the_trace():
    script = Scripted()
    script.metrics = [404]
    finished, _ = run(script, 0.0, 0.01, 0.02, requests=1)
    assert len(finished.records) == 1 and finished.report()["harvested_tokens"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_what_was_measured(number):
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        await response.write(tokens(1))
        if len(script.bodies) == 1:  # the probe
            await response.write(tokens(2, reason="length") + DONE)
            return response
        os.kill(os.getpid(), number)
        await asyncio.sleep(60)
        return response

    script = Scripted(endless)
    script.metrics = [404]
    finished, _ = run(script, 0.0, 500.0)
    assert finished.was_stopped and finished.report()["cut"] == 1
