"""What lending a `vllm serve` costs its users, and what it brings: two vLLM servers on one core, all modes in one run.

    python benchmarks/coserve_vllm.py --vllm-python .venv-vllm/bin/python --json FILE

    alone_1, alone_2   serving alone, twice; the rollout engine is there, parked, with nothing to do
    idle, decode       lent under ROSE's admission in these modes
    rollouts_alone     no serving load
    ungated            rollouts run whenever the kernel lets them

One seeded trace is replayed under every mode: exponential gaps, prompts of 20 to 200 tokens, answers of 8 to 48. It is
cut into segments, which are replayed under every mode in turn, in rotating order, so that all meet the same weather of
the machine; `ungated` comes last in each, since what is known of serving's steps ends with it and is learnt again. TTFT
counts from the scheduled arrival. Rollouts are turns in a closed loop, 40 prompt tokens and 32 generated. Both
engines have their workers inside their engine processes, as the rollout engine always has on a CPU. Before anything is
measured, serving gets the requests from which its step times are learnt. Differences of attainment are paired per
request, to the two runs of serving alone pooled; `aa_spread` is drawn from whole minutes, and null for under two.

Budgets are `given` (`--ttft-ms` and `--tpot-ms`) or `calibrated`: twice the P95 of a run of serving alone before
everything else.
`ungated` shares the core as equals, if this process may say so (`nice`). Where the time goes is in every row: shares of
it in which serving had a request (`present_share`), ran a step (`serving_time_share`), rollouts ran (`lent_share`) and
rollouts waited, by the reason (`waited_share`).

`gate_close_ms` is from a request's arrival at serving's front until the rollout engine is parked, `gate_close_steps`
how many rollout steps ended in between. The step under way is the only one that should, and it may take its time: from
the moment that serving has work, the core is serving's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import harness
from coserving.beside_vllm import (
    COLUMNS,
    GIVEN,
    Answer,
    Asked,
    Budget,
    Piece,
    at_share,
    bars_of,
    judged,
    lent_mode,
    row_of,
    trace,
)
from coserving.plan import rotated

sys.path.insert(0, str(harness.PROJECT))
from tests.vllm import engines

from rose.core.observed_engine import Milestone, MilestoneKind
from rose.engines.base import Request, Sampling
from rose.errors import RoseError, Unavailable
from rose.models.presets import write_preset
from rose.vllm.control_segment import Status, Terms
from rose.vllm.discovery import find_segment
from rose.vllm.engine_process import NICE, EngineProcess
from rose.vllm.seqlock_file import Torn
from rose.vllm.status_segment import SegmentReader, StatusChange
from rose.vllm.vllm_engine import VllmEngine

TAKING_TURNS = ("alone_1", "idle", "decode", "alone_2", "rollouts_alone")
MODES = (*TAKING_TURNS, "ungated")
SEGMENT_REQUESTS = 80
ALL, LEASE_S = 1 << 20, 3.0
TURNS = 6  # at once
PATIENCE_S = 120.0
USERS = (170, 230, 300)  # tokens of answers that never end together


class Bench:
    """Both engines, for the whole run."""

    def __init__(self, serving: engines.ServingEngine, process: EngineProcess, budget: Budget) -> None:
        self.serving, self.process, self.budget = serving, process, budget
        self.worker: VllmEngine
        self.turns = 0
        self.terms: Terms | None = None
        self.pieces: dict[str, list[Piece]] = {mode: [] for mode in MODES}  # in the order of the trace

    def terms_of(self, mode: str) -> Terms:
        return Terms(str(find_segment(self.serving.url)), mode, self.budget.ttft_s, self.budget.tpot_s)  # type: ignore[arg-type]

    async def ask(self, http: aiohttp.ClientSession, asked: Asked, due_s: float) -> Answer:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        params = {"max_tokens": asked.max_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": list(asked.prompt), "sampling_params": params, "stream": True}
        times_s: list[float] = []
        async with http.post(self.serving.url + "/inference/v1/generate", json=body) as reply:
            async for line in reply.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                    times_s.append(time.monotonic())
        return Answer(asked.at_s, times_s[0] - due_s, [b - a for a, b in pairwise(times_s)])

    async def replay(self, asked: list[Asked]) -> list[Answer]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            start_s = time.monotonic() + 0.1 - asked[0].at_s
            return await asyncio.gather(*(self.ask(http, one, start_s + one.at_s) for one in asked))

    async def roll(self, number: int) -> None:
        while True:
            self.turns += 1
            prompt = tuple((number * 7 + self.turns + i) % 250 for i in range(40))
            request = Request(f"turn-{self.turns}", prompt, Sampling(max_tokens=32, ignore_eos=True, seed=self.turns))
            async for _ in self.worker.generate(request):
                pass

    async def keep(self) -> None:
        while True:
            until_s = time.monotonic() + LEASE_S
            self.worker.write_control(tokens=ALL, sequences=ALL, until_s=until_s, terms=self.terms)
            await asyncio.sleep(0.5)

    @asynccontextmanager
    async def lending(self, mode: str | None, turns: int = TURNS) -> AsyncIterator[None]:
        """Under a mode of admission, or under none, with so many turns at once."""
        self.terms = self.terms_of(mode) if mode is not None else None
        tasks = [asyncio.create_task(self.keep()), *(asyncio.create_task(self.roll(i)) for i in range(turns))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def piece(self, mode: str, asked: list[Asked], rest_s: float) -> Piece:
        nice = self.be_equal() if mode == "ungated" else NICE
        async with self.lending(lent_mode(mode), 0 if mode.startswith("alone") else TURNS):
            await asyncio.sleep(1.0)
            begun, begun_s = self.worker.status(), time.monotonic()
            busy = Busy(find_segment(self.serving.url))
            if mode == "rollouts_alone":
                await asyncio.sleep(rest_s)
            answers = [] if mode == "rollouts_alone" else await self.replay(asked)
            seconds, ended = time.monotonic() - begun_s, self.worker.status()
            steps_s, present_s = busy.close()
        if mode == "ungated":
            self.be_behind()
        return Piece(begun, ended, seconds, steps_s, present_s, nice, answers)

    def be_equal(self) -> int:
        """The rollout engine is no longer behind serving, where the kernel lets us say so."""
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PGRP, self.process.process_id, 0)
        return os.getpriority(os.PRIO_PROCESS, self.process.process_id)

    def be_behind(self) -> None:
        os.setpriority(os.PRIO_PGRP, self.process.process_id, NICE)


def looked(reader: SegmentReader) -> StatusChange | None:
    """Again and again while it is torn: what was before must not be told with what comes."""
    while True:
        with suppress(Torn):
            return reader.read()


class Busy:
    """Adds up serving's steps, and the time in which it had a request; often enough to miss none."""

    def __init__(self, board: Path) -> None:
        self._reader = SegmentReader(board)
        looked(self._reader)
        self._task = asyncio.create_task(self._watch())
        self._steps_s = self._present_s = self._since_s = 0.0
        self._here: set[int] = set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self._look()

    def _look(self) -> None:
        with suppress(Torn):  # what this look would have told comes with the next
            seen = self._reader.read()
            if seen is not None:
                self._steps_s += sum(step.seconds for step in seen.steps)
                for one in seen.milestones:
                    self._milestone(one)

    def _milestone(self, one: Milestone) -> None:
        if self._here:
            self._present_s += max(0.0, one.at_s - self._since_s)
        self._since_s = max(self._since_s, one.at_s)
        if one.kind is MilestoneKind.ARRIVED:
            self._here.add(one.key)
        elif one.kind is not MilestoneKind.FIRST_TOKEN:
            self._here.discard(one.key)

    def close(self) -> tuple[float, float]:
        """In all: steps, and with a request."""
        self._task.cancel()
        self._look()
        self._reader.close()
        return self._steps_s, self._present_s


async def gated_cpu_share(bench: Bench, seconds: float) -> tuple[float, int]:
    """Of the rollout engine, with turns waiting behind a closed gate while serving works; and the steps it made."""
    stop_s = time.monotonic() + seconds + 1.0

    async def use(tokens: int) -> None:
        while time.monotonic() < stop_s:
            await bench.serving.answer(list(range(60)), tokens)

    async with bench.lending("idle"):
        users = [asyncio.create_task(use(tokens)) for tokens in USERS]
        await asyncio.sleep(1.0)
        before_s, begun_s, begun = engines.cpu_s(bench.process.process_id), time.monotonic(), bench.worker.status()
        await asyncio.sleep(seconds - 0.5)
        used_s = engines.cpu_s(bench.process.process_id) - before_s
        passed_s, steps = time.monotonic() - begun_s, bench.worker.status().steps - begun.steps
        await asyncio.gather(*users)
    return round(used_s / passed_s, 4), steps


async def gate_closes(bench: Bench, tries: int) -> list[tuple[float, int]]:
    """Milliseconds from a request's arrival until the rollout engine is parked, and the steps that ended meanwhile."""
    reader = SegmentReader(find_segment(bench.serving.url))
    found = []
    async with bench.lending("idle"):
        for _ in range(tries):
            await until(bench.worker, lambda status: status.state == "running")
            await asyncio.sleep(random.uniform(0.1, 0.3))
            looked(reader)
            user = asyncio.create_task(bench.serving.answer(list(range(60)), 40))
            seen, told = await _until_parked(bench.worker, user), looked(reader)
            came_s = [one.at_s for one in told.milestones if one.kind is MilestoneKind.ARRIVED] if told else []
            if seen is not None and came_s:
                began, parked = _steps_at(seen, min(came_s)), seen[-1]
                found.append(((parked.at_s - min(came_s)) * 1e3, parked.steps - began))
            await user
    reader.close()
    return found


async def _until_parked(worker: VllmEngine, user: asyncio.Task[Any]) -> list[Status] | None:
    """All that it said until then; None if the user was answered before."""
    seen = [worker.status()]
    while not (seen[-1].state == "parked" and "serving has work" in seen[-1].why):
        if user.done():
            return None
        await asyncio.sleep(0.001)
        seen.append(worker.status())
    return seen


def _steps_at(seen: list[Status], at_s: float) -> int:
    """That had ended by then."""
    return max((status.steps for status in seen if status.at_s <= at_s), default=seen[0].steps)


async def until(worker: VllmEngine, is_so: Callable[[Status], bool]) -> None:
    """Raises Unavailable with the gate's reason where lending does not come about: nothing can be measured then."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so(status := worker.status()):
        if time.monotonic() > deadline_s:
            raise Unavailable(f"nothing has been lent for {PATIENCE_S:.0f} s: {status.why}")
        await asyncio.sleep(0.001)


async def learn(bench: Bench, seed: int) -> None:
    """What steps of both engines take; after `ungated` only from new ones, since the gate leaves out the others."""
    async with bench.lending("idle"):
        await bench.replay(trace(seed + 1, 60, 6.0))
        await until(bench.worker, lambda status: status.lent.steps >= 100)


async def calibrate(bench: Bench, seed: int, count: int, rate_rps: float) -> None:
    """What serving alone can promise."""
    async with bench.lending("idle", turns=0):
        answers = await bench.replay(trace(seed + 2, count, rate_rps))
    ttfts, tpots = [one.ttft_s for one in answers], [one.tpot_s for one in answers]
    bench.budget = Budget(2 * at_share(ttfts, 0.95), 2 * at_share(tpots, 0.95))


async def measure_all(bench: Bench, asked: list[Asked], seed: int, rest_s: float) -> None:
    segments = [asked[begin : begin + SEGMENT_REQUESTS] for begin in range(0, len(asked), SEGMENT_REQUESTS)]
    for number, segment in enumerate(segments):
        for mode in (*rotated(TAKING_TURNS, number), "ungated"):
            print(f"segment {number + 1} of {len(segments)}, {mode}", flush=True)
            bench.pieces[mode].append(await bench.piece(mode, segment, rest_s))
        if number + 1 < len(segments):
            await learn(bench, seed)


async def measure(bench: Bench, arguments: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    bench.worker = await bench.process.start()
    await bench.serving.ready()
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {engines.CORE} or {engines.CORE})  # clients have the other cores
    quick, seed = arguments.quick, arguments.seed
    await learn(bench, seed)
    if arguments.budget == "calibrated":
        await calibrate(bench, seed, 30 if quick else 120, arguments.rate)
    asked = trace(seed, arguments.requests or (60 if quick else 400), arguments.rate)
    closes = await gate_closes(bench, 5 if quick else 20)
    gated_share, gated_steps = await gated_cpu_share(bench, 4.0 if quick else 10.0)
    await measure_all(bench, asked, seed, 10.0)
    rows = [row_of(mode, bench.pieces[mode], bench.budget) for mode in MODES]
    times_ms, steps = [ms for ms, _ in closes], [count for _, count in closes]
    overall = {
        "budget": arguments.budget,
        "ttft_budget_ms": round(bench.budget.ttft_s * 1e3, 1),
        "tpot_budget_ms": round(bench.budget.tpot_s * 1e3, 1),
        "gated_cpu_share": gated_share,
        "gated_steps": gated_steps,
        "gate_close_ms": round(statistics.median(times_ms), 1) if closes else None,
        "gate_close_ms_high": round(max(times_ms), 1) if closes else None,
        "gate_close_steps": statistics.median(steps) if closes else None,
        "gate_close_steps_high": max(steps) if closes else None,
        "rollout_step_ms": next(row["rollout_step_ms"] for row in rows if row["mode"] == "rollouts_alone"),
    }
    return rows, overall


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--vllm-python", type=Path, default=Path(engines.PYTHON or ".venv-vllm/bin/python"))
    options.add_argument("--serving-model", default="qwen3-3m")
    options.add_argument("--rollout-model", default="qwen3-3m")
    options.add_argument("--budget", choices=("given", "calibrated"), default="given", help="what serving promises")
    options.add_argument("--ttft-ms", type=float, default=GIVEN.ttft_s * 1e3, help="given budget (500)")
    options.add_argument("--tpot-ms", type=float, default=GIVEN.tpot_s * 1e3, help="given budget (150)")
    options.add_argument("--rate", type=float, default=3.0, help="requests a second (3); two thirds of one core busy")
    options.add_argument("--requests", type=int, default=0, help="of the trace; 0 takes 60 with --quick, else 400")
    arguments = options.parse_args()
    engines.PYTHON = str(arguments.vllm_python.absolute())
    begun = harness.machine()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ROSE_BOARDS"] = str(Path(folder) / "boards")
        models = [Path(folder) / name for name in ("serving", "rollout")]
        for seed, (preset, model) in enumerate(zip((arguments.serving_model, arguments.rollout_model), models)):
            write_preset(preset, model, seed=seed)
        serving = engines.ServingEngine(models[0], Path(folder) / "serving.log")
        process = EngineProcess(engines.rollout_engine(models[1]))
        bench = Bench(serving, process, Budget(arguments.ttft_ms / 1e3, arguments.tpot_ms / 1e3))
        try:
            rows, overall = asyncio.run(_whole(bench, process, arguments))
        finally:
            serving.close()
    answers = {mode: [one for piece in pieces for one in piece.answers] for mode, pieces in bench.pieces.items()}
    overall |= judged(rows, answers, bench.budget)
    bars = bars_of(rows, overall)
    harness.print_table(rows, COLUMNS)
    overall["rate_rps"] = arguments.rate
    models_of = {"serving": arguments.serving_model, "rollout": arguments.rollout_model}
    return harness.finish(arguments, "coserve_vllm", rows, bars, begun, models=models_of, **overall)


async def _whole(bench: Bench, process: EngineProcess, arguments: Any) -> Any:
    try:
        return await measure(bench, arguments)
    finally:
        await process.close()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RoseError as error:
        sys.exit(str(error))
