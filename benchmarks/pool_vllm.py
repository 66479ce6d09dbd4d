"""What one pool of KV pages under two vLLM servers brings over memory cut in two, and what it costs serving.

    python benchmarks/pool_vllm.py --vllm-python .venv-vllm/bin/python --json FILE

    plain    vLLM without ROSE, all of the KV memory: what serving can do at best
    static   half of the KV memory for serving, half for the rollout engine (`--kv static`)
    pool     all of it in one pool (`ROSE_KV_POOL=auto`, `--kv pool`)

Both engines share one core. Every repeat starts the engines of each kind anew, in rotating order. `rollout_tok_s` is a
closed loop of 24 turns of 900 tokens, twice what half of the memory holds, while users ask one by one a fifth of
the time. Then users ask for half of the KV memory at once while rollouts hold what they can: `hand_over_ms` is from
serving's first request for pages until it lacks none (zero if the headroom was enough), `preempted` and `refused` count
serving's requests, `burst_s` is until the last answer. `evicted` turns end early, and `lost_tokens` are those that the
rollout engine produced and no client received. At last `serving_tok_s` is a closed loop of sixteen users alone.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import harness
from coserving.plan import rotated

sys.path.insert(0, str(harness.PROJECT))
from tests.vllm import engines

from rose.core.slo import Budgets
from rose.engines.base import Request, Sampling
from rose.engines.token_stream import TokenStream
from rose.errors import RoseError
from rose.models.presets import write_preset
from rose.vllm.plugin import POOL_VARIABLE
from rose.vllm.status_segment import SegmentReader
from rose.vllm.vllm_agent import VllmEngineClient, VllmLending

KINDS = ("plain", "static", "pool")
MEMORY_MB = 96  # twelve groups of 2,048 tokens
USERS, PROMPT, ANSWER = 16, 400, 64
BURST, BURST_PROMPT, BURST_ANSWER = 12, 800, 200  # half of the memory
TURNS, TURN_PROMPT, TURN_ANSWER = 24, 800, 100
LOAD = 0.2
BUDGETS = Budgets(10.0, 2.0, answer_s=120.0)  # wide: what is measured here is memory
COLUMNS = ("kv", "serving_tok_s", "rollout_tok_s", "rollout_preempted", "hand_over_ms", "burst_s", "preempted",
           "refused", "evicted", "lost_tokens", "moved_blocks")  # fmt: skip


def prompt(seed: int, tokens: int) -> list[int]:
    return [(11 * seed + 5 * place + seed * place % 13) % 240 for place in range(tokens)]


class Device:
    """A serving engine, and beside it, except for `plain`, a rollout engine."""

    def __init__(self, serving: engines.ServingEngine, client: VllmEngineClient | None) -> None:
        self.serving, self.client = serving, client
        self.asked = self.turns = self.received = self.evicted = self.refused = 0

    async def user(self, tokens: int, answer: int) -> int:
        self.asked += 1
        try:
            return len((await self.serving.answer(prompt(self.asked, tokens), answer))[0])
        except (AssertionError, aiohttp.ClientError):
            self.refused += 1
            return 0

    async def serve(self, seconds: float) -> float:
        """Return the tokens a second of a closed loop of users."""
        until_s, tokens = time.monotonic() + seconds, 0

        async def loop() -> None:
            nonlocal tokens
            while time.monotonic() < until_s:
                tokens += await self.user(PROMPT, ANSWER)

        begun_s = time.monotonic()
        await asyncio.gather(*(loop() for _ in range(USERS)))
        return tokens / (time.monotonic() - begun_s)

    async def turn(self) -> None:
        assert self.client is not None
        self.turns += 1
        sampling = Sampling(max_tokens=TURN_ANSWER, ignore_eos=True, temperature=0.0)
        request = Request(f"turn-{self.turns}", tuple(prompt(self.turns, TURN_PROMPT)), sampling)
        stream, reason = TokenStream(), None
        self.client.submit([request], stream)
        while reason is None:
            for event in await stream.take():
                self.received += len(event.token_ids)
                reason = event.finish_reason
        self.evicted += reason == "abort"

    @asynccontextmanager
    async def rolling(self) -> AsyncIterator[None]:
        """Keep the turns under way; wait for the last ones, so that every token is counted."""
        stopped = asyncio.Event()

        async def loop() -> None:
            while not stopped.is_set():
                await self.turn()

        loops = [asyncio.create_task(loop()) for _ in range(TURNS)]
        try:
            yield
        finally:
            stopped.set()
            await asyncio.gather(*loops)

    def counts(self) -> dict[str, int]:
        status = self.client.status if self.client is not None else None
        assert status is not None
        return {name: getattr(status, name) for name in ("generated_tokens", "preemptions", "moved_blocks", "pages")}

    async def burst(self) -> tuple[float, float]:
        """Ask for half of the memory at once. Return the time until serving lacked no page, and until the end."""
        assert self.client is not None and self.client._segment is not None
        reader, begun_s, short_s, hand_over_s = SegmentReader(self.client._segment), time.monotonic(), 0.0, 0.0
        answers = asyncio.gather(*(self.user(BURST_PROMPT, BURST_ANSWER) for _ in range(BURST)))
        while not answers.done():
            now_s, asked = time.monotonic(), reader.pages[2]
            short_s = short_s or (now_s if asked else 0.0)
            if short_s and not asked and not hand_over_s:
                hand_over_s = now_s - short_s
            await asyncio.sleep(0.001)
        reader.close()
        return hand_over_s, time.monotonic() - begun_s


@asynccontextmanager
async def device(kind: str, models: list[Path], folder: Path) -> AsyncIterator[Device]:
    os.environ[POOL_VARIABLE] = "auto" if kind == "pool" else ""
    memory_mb = MEMORY_MB // 2 if kind == "static" else MEMORY_MB
    scheduler = "" if kind == "plain" else "ServingScheduler"
    serving = engines.ServingEngine(models[0], folder / f"{kind}.log", scheduler, kv_memory_mb=memory_mb)
    client = None
    try:
        await serving.ready()
        if kind != "plain":
            engine = engines.rollout_engine(models[1], max_sequences=TURNS, step_tokens=512, kv_memory_mb=memory_mb)
            client = VllmEngineClient(VllmLending(engine, serving.url, "decode", BUDGETS, kv=kind))  # type: ignore[arg-type]
            await client.start()
        yield Device(serving, client)
    finally:
        if client is not None:
            await client.close()
        serving.close()


async def keep_lending(device: Device) -> None:
    """A circuit breaker that trips on a busy machine says nothing of memory."""
    assert device.client is not None
    while True:
        device.client.desired = replace(device.client.desired, resumes=device.client.desired.resumes + 1)
        await asyncio.sleep(0.5)


async def measure(device: Device, seconds: float) -> dict[str, float]:
    answer_s, row = await learn(device), dict[str, float]()
    if device.client is not None:
        resuming = asyncio.create_task(keep_lending(device))
        row = await measure_sharing(device, seconds, answer_s)
        resuming.cancel()
    return {"serving_tok_s": await device.serve(seconds), **row}


async def learn(device: Device) -> float:
    """Let lending learn what serving's steps take. Return how long an answer takes alone."""
    for _ in range(4):
        await asyncio.gather(*(device.user(PROMPT, ANSWER) for _ in range(2)))
    begun_s = time.monotonic()
    for _ in range(4):
        await device.user(PROMPT, ANSWER)
    return (time.monotonic() - begun_s) / 4


async def measure_sharing(device: Device, seconds: float, answer_s: float) -> dict[str, float]:
    gap_s, begun = answer_s / LOAD, device.counts()
    async with device.rolling():
        began_s, users = time.monotonic(), []
        while time.monotonic() - began_s < seconds:
            users.append(asyncio.create_task(device.user(PROMPT, ANSWER)))
            await asyncio.sleep(gap_s)
        took_s, middle = time.monotonic() - began_s, device.counts()
        await asyncio.gather(*users)
        hand_over_s, burst_s = await device.burst()
    ended = device.counts()
    return {
        "rollout_tok_s": (middle["generated_tokens"] - begun["generated_tokens"]) / took_s,
        "rollout_preempted": middle["preemptions"] - begun["preemptions"],
        "hand_over_ms": hand_over_s * 1e3,
        "burst_s": burst_s,
        "preempted": await device.serving.metric("vllm:num_preemptions_total"),
        "refused": device.refused,
        "evicted": device.evicted,
        "lost_tokens": ended["generated_tokens"] - begun["generated_tokens"] - device.received,
        "moved_blocks": ended["moved_blocks"],
    }


async def measure_all(models: list[Path], folder: Path, repeats: int, seconds: float) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for repeat in range(repeats):
        for kind in rotated(KINDS, repeat):
            print(f"repeat {repeat + 1} of {repeats}, {kind}", flush=True)
            async with device(kind, models, folder) as one:
                found[kind].append(await measure(one, seconds))
    return found


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--vllm-python", type=Path, default=Path(engines.PYTHON or ".venv-vllm/bin/python"))
    options.add_argument("--model", default="qwen3-3m", help="of both engines (qwen3-3m)")
    arguments = options.parse_args()
    engines.PYTHON = str(arguments.vllm_python.absolute())
    begun, repeats, seconds = harness.machine(), 1 if arguments.quick else 3, 15.0 if arguments.quick else 40.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["ROSE_BOARDS"] = str(folder / "boards")
        models = [folder / which for which in ("serving", "rollout")]
        for seed, model in enumerate(models):
            write_preset(arguments.model, model, seed=seed)
        found = asyncio.run(measure_all(models, folder, repeats, seconds))
    rows = [
        {"kv": kind, "n": repeats, **{key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}}
        for kind, runs in found.items()
    ]
    ratios = [pool["serving_tok_s"] / plain["serving_tok_s"] for pool, plain in zip(found["pool"], found["plain"])]
    gains = [pool["rollout_tok_s"] / half["rollout_tok_s"] for pool, half in zip(found["pool"], found["static"])]
    pool, overall = rows[KINDS.index("pool")], dict[str, Any]()
    harness.put_ratio(overall, "serving_pool_over_plain", ratios)
    harness.put_ratio(overall, "rollouts_pool_over_static", gains)
    bars = [
        harness.wanted("serving throughput on a pool, of plain vLLM's", overall["serving_pool_over_plain"], 0.97),
        harness.wanted("rollout throughput at 20 % load, pool over static", overall["rollouts_pool_over_static"], 1.0),
        harness.wanted("hand-over of pages, ms", pool["hand_over_ms"], 100.0, at_most=True),
        harness.wanted("serving requests preempted or refused", pool["preempted"] + pool["refused"], 0, at_most=True),
        harness.wanted("tokens of evicted turns lost", pool["lost_tokens"], 0, at_most=True),
    ]
    harness.print_table(rows, COLUMNS)
    return harness.finish(arguments, "pool_vllm", rows, bars, begun, model=arguments.model, **overall)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        try:
            sys.exit(main())
        except RoseError as error:
            sys.exit(str(error))
