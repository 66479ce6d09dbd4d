"""The step on one pool of KV pages under two running engines: a burst of users takes memory that rollouts hold.

Serving is started once more, with its KV memory as a pool; the rollout engine joins it by itself. Rollouts with long
answers fill what they may hold. Then users need the free pages and half of the others, again and again. Serving must
get them without preempting or refusing a request, and its greedy tokens must not change. At the end it is killed.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp

from rose.errors import ModelError, Unavailable
from rose.models.model_spec import read_spec
from rose.verify.failure_steps import GONE_S, group_lives
from rose.verify.load_steps import learn
from rose.verify.page_steps import HAND_OVER_MS_MAX, add_times
from rose.verify.rollout_side import RolloutSide
from rose.verify.serving_process import CONTEXT_TOKENS, ServingProcess
from rose.verify.step_context import StepContext, StepFindings
from rose.vllm.discovery import find_segment
from rose.vllm.status_segment import SegmentReader

POOL = {"ROSE_KV_POOL": "auto"}
BURSTS, SAME_PROMPTS = 5, 4
TAKEN_SHARE = 0.5  # of what rollouts hold, which a burst needs beside all free pages
HELD_SHARE, HELD_SHARE_MIN = (
    0.6,
    0.25,
)  # of the pool, by rollouts, before a burst: waited for; so that it means anything
PROMPT_SHARE = 0.75  # of the context, by the prompts of rollouts: prompts fill pages fast
ANSWER_TOKENS, VOCABULARY = 64, 200
TURNS = 16
POOL_TOKENS, POOL_BYTES_MAX, SEQUENCES_MAX = 96 << 10, 8 << 30, 256
FILLED_S, QUIET_S, POLL_S = 15.0, 2.0, 0.001
METRICS_BYTES_MAX = 4 << 20
PREEMPTIONS = re.compile(rb"^vllm:num_preemptions(?:_total)?\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


@dataclass(slots=True)
class Burst:
    """What happened to pages in a burst: how long serving asked for some, and the least that rollouts held."""

    asked_ms: list[float]
    least: int


async def pool_burst(context: StepContext) -> None:
    """Let users need at once what is free of the pool and half of what rollouts hold."""
    environment, flags = {**context.lab.time_slices, **POOL}, pool_flags(context)
    side = await context.lab.rollouts("decode", serving_environment=environment, extra=flags, sequences=TURNS)
    serving = await context.lab.serving(environment, flags)
    reader: Any = SegmentReader(find_segment(serving.url))
    try:
        await _bursts(context, side, serving, reader)
        await _kill_serving(context, side, serving)
    finally:
        reader.close()
        await context.lab.close()  # the next steps have no pool


def pool_flags(context: StepContext) -> tuple[str, ...]:
    """Return flags for a pool that requests can fill; on a CPU it is small enough as it is."""
    if context.settings.is_cpu:
        return ()
    with suppress(ModelError):  # another architecture than ROSE's own engine knows
        pool_bytes = min(POOL_BYTES_MAX, POOL_TOKENS * 2 * read_spec(context.lab.serving_model()).kv_values_per_token)
        return ("--kv-cache-memory-bytes", str(pool_bytes), "--max-num-seqs", str(SEQUENCES_MAX))
    return ("--kv-cache-memory-bytes", str(POOL_BYTES_MAX), "--max-num-seqs", str(SEQUENCES_MAX))


async def _bursts(context: StepContext, side: RolloutSide, serving: ServingProcess, reader: Any) -> None:
    findings, header, length = context.findings, reader.header, CONTEXT_TOKENS[context.settings.is_cpu]
    findings.fact("pool", f"{header.pool_pages} pages, {header.group_pages} in a group")
    prompt_tokens = int(PROMPT_SHARE * length)
    same_prompts = [burst_prompt(number, prompt_tokens) for number in range(SAME_PROMPTS)]
    expected = [await serving.greedy(prompt, ANSWER_TOKENS) for prompt in same_prompts]
    before, times_ms, held, given, same = await _preemptions(serving), [], [], [], 0
    async with side.turning(TURNS, prompt_tokens, length - prompt_tokens - 1):
        await learn(context, side, serving)
        for number in range(1, BURSTS + 1):
            held.append(await _filled(side, header.pool_pages))
            share = 1 - held[-1] / header.pool_pages * (1 - TAKEN_SHARE)
            count = burst_size(share * header.kv_blocks, header.block_tokens, prompt_tokens)
            context.say(f"burst {number} of {BURSTS}: {count} requests, {held[-1]} pages are with rollouts")
            prompts = same_prompts + [burst_prompt(1000 * number + one, prompt_tokens) for one in range(count)]
            watching = asyncio.create_task(_watch(side, reader))
            answers = await asyncio.gather(*(serving.greedy(prompt, ANSWER_TOKENS) for prompt in prompts[:count]))
            await asyncio.sleep(QUIET_S)
            watching.cancel()
            burst = await watching
            times_ms += burst.asked_ms
            given.append(held[-1] - burst.least)
            same += list(answers[:SAME_PROMPTS]) == expected[: len(answers)]
    findings.figure("pages of rollouts before a burst, at least", min(held), "pages", len(held))
    findings.figure("pages that rollouts gave in a burst, at most", max(given), "pages", len(given))
    preempted = await _preemptions(serving) - before
    findings.check("serving preempted no request", preempted == 0, f"{preempted:g}")
    findings.check("greedy tokens are the same in every burst", same == BURSTS, f"{same} of {BURSTS}")
    _add_asked(findings, times_ms)


def _add_asked(findings: StepFindings, times_ms: list[float]) -> None:
    """Add for how long serving asked for pages each time."""
    if not times_ms:
        findings.note("Serving never asked for pages: rollouts gave them up while it grew, or free ones were enough.")
        return
    add_times(findings, "serving asked for pages for", times_ms, "ms")
    median = statistics.median(times_ms)
    findings.check(f"the median is under {HAND_OVER_MS_MAX:g} ms", median < HAND_OVER_MS_MAX, f"{median:.1f} ms")


async def _filled(side: RolloutSide, pages: int) -> int:
    """Wait until rollouts hold much of a pool, and return how much. Raises Unavailable if it is little."""
    with suppress(Unavailable):
        await side.until(lambda status: _pages(status) >= HELD_SHARE * pages, FILLED_S, "pages")
    least = int(HELD_SHARE_MIN * pages)
    await side.until(lambda status: _pages(status) >= least, QUIET_S, f"{least} pages of rollouts")
    return _pages(side.status)


async def _kill_serving(context: StepContext, side: RolloutSide, serving: ServingProcess) -> None:
    """Kill the serving engine: the rollout engine must end too, since it keeps the pool's memory alive."""
    context.say("SIGKILL to the serving engine")
    group, began_s = side.group, time.monotonic()
    serving.kill()
    while group_lives(group) and time.monotonic() - began_s < GONE_S:
        await asyncio.sleep(POLL_S)
    seconds = time.monotonic() - began_s
    context.findings.figure("from the death of serving until the rollout engine was gone", seconds, "s", 1)
    context.findings.check("the rollout engine ends when its pool's serving engine has died", not group_lives(group))


def burst_prompt(number: int, tokens: int) -> list[int]:
    """Return a prompt that no other number has, so that no prefix cache holds it."""
    return random.Random(number).choices(range(5, VOCABULARY), k=tokens)


def burst_size(blocks: float, block_tokens: int, prompt_tokens: int) -> int:
    """Return how many requests of this length need so many blocks together."""
    each = -(-(prompt_tokens + ANSWER_TOKENS) // block_tokens)
    return max(SAME_PROMPTS, int(blocks // each))


async def _watch(side: RolloutSide, reader: Any) -> Burst:
    """Return what happens to pages until this is cancelled."""
    seen = Burst([], _pages(side.status))
    since_s: float | None = None
    with suppress(asyncio.CancelledError):
        while True:
            asked, now_s = reader.pages[2], time.monotonic()
            if asked and since_s is None:
                since_s = now_s
            elif not asked and since_s is not None:
                seen.asked_ms.append(1e3 * (now_s - since_s))
                since_s = None
            seen.least = min(seen.least, _pages(side.status))
            await asyncio.sleep(POLL_S)
    if since_s is not None:
        seen.asked_ms.append(1e3 * (time.monotonic() - since_s))
    return seen


def _pages(status: Any) -> int:
    """Return the pages of the pool that the rollout engine holds."""
    return int(status.pages)


async def _preemptions(serving: ServingProcess) -> float:
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{serving.url}/metrics") as response:
            text = await response.content.read(METRICS_BYTES_MAX)
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"vLLM's metrics cannot be read: {error!r}") from error
    return sum(float(value) for value in PREEMPTIONS.findall(text))
