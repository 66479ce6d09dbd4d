"""Steps that break the rollout side while users are served: the serving engine must not notice.

Each of them sends requests all the time, breaks something after a part of them, and checks that every request was
answered, that greedy tokens are the same afterwards, and that the rollout side is as it should be.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from rose.errors import Unavailable
from rose.verify.kit_results import write_json
from rose.verify.load_steps import LEARNING_S, learn, learnt_rollouts
from rose.verify.replays import add_served, replay
from rose.verify.rollout_side import RolloutSide
from rose.verify.serving_process import ServingProcess
from rose.verify.step_context import StepContext
from rose.vllm.engine_process import USABLE
from rose.vllm.vllm_agent import HANG_S

PROMPT = [(7 * number) % 250 for number in range(40)]
GREEDY_TOKENS = 64
PIECE_S = 5.0  # of requests that are sent at a time, until what is waited for has come
RESTART_S = 300.0  # of a rollout engine, with a large model
GONE_S = 30.0
POLL_S = 0.05


async def kill_rollouts(context: StepContext) -> None:
    """Kill the rollout engine with SIGKILL while users are served."""
    await _break_engine(context, signal.SIGKILL, RESTART_S)


async def stop_rollouts(context: StepContext) -> None:
    """Stop the rollout engine with SIGSTOP while users are served: it holds its memory, and computes nothing."""
    context.findings.fact("the agent ends an engine that does not obey for", f"{HANG_S:g} s")
    await _break_engine(context, signal.SIGSTOP, HANG_S + RESTART_S)


async def _break_engine(context: StepContext, number: signal.Signals, seconds_max: float) -> None:
    async with learnt_rollouts(context, "idle") as side:
        serving = await context.lab.serving()
        restarts, group = side.client.restarts, side.group

        async def break_it() -> float:
            context.say(f"{number.name} to the rollout engine")
            os.killpg(group, number)
            return await _until_restarted(side, restarts, seconds_max)

        seconds = await under_load(context, serving, break_it)
        context.findings.figure("until the rollout engine ran again", seconds, "s", 1)
        context.findings.check("the old rollout engine is gone", not group_lives(group))
        await learn(context, side, serving)
        await side.until(lambda status: status.steps > 0, LEARNING_S, "a step of the new rollout engine")


async def _until_restarted(side: RolloutSide, restarts: int, seconds_max: float) -> float:
    began_s = time.monotonic()
    while side.client.restarts == restarts or side.client.status is None:
        if time.monotonic() - began_s > seconds_max:
            raise Unavailable(f"the agent did not restart the rollout engine within {seconds_max:g} s")
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began_s


async def under_load(
    context: StepContext, serving: ServingProcess, action: Callable[[], Coroutine[Any, Any, float]]
) -> float:
    """Send requests before, during and after an action, and check that users noticed nothing. Return its result."""
    requests = max(4, round(PIECE_S * context.settings.rate_rps))
    before = await serving.greedy(PROMPT, GREEDY_TOKENS)
    records = await replay(serving.url, context.settings, requests)
    acting = asyncio.create_task(action())
    try:
        while not acting.done():
            records += await replay(serving.url, context.settings, requests)
        result = await acting
    finally:
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
    records += await replay(serving.url, context.settings, requests)
    add_served(context.findings, records, context.settings)
    after = await serving.greedy(PROMPT, GREEDY_TOKENS)
    context.findings.check("greedy tokens of serving are the same before and after", before == after)
    context.findings.check("the serving engine is the same process", serving.is_running)
    return result


def group_lives(group: int) -> bool:
    """Return whether a process group has a process that is not a zombie."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] not in "ZX":
                    return True
    return False


async def kill_agent(context: StepContext) -> None:
    """Kill `rose lend vllm` itself: its rollout engine must end too, and serving must not notice."""
    await context.lab.close_rollouts()
    serving = await context.lab.serving()
    context.say("starting rollouts in a process of their own")
    terms = context.folder / "lending.json"
    write_json(terms, context.settings)
    model = str(context.lab.rollout_model())
    agent = subprocess.Popen(
        [sys.executable, "-m", "rose.verify.lending_process", str(terms), serving.url, model],
        stdout=subprocess.PIPE,
        env={**os.environ, **context.lab.time_slices},
        preexec_fn=lambda: os.sched_setaffinity(0, USABLE),  # this process keeps off the device's cores
    )
    try:
        group = await _group_of(agent)

        async def kill_it() -> float:
            context.say("SIGKILL to the agent")
            agent.kill()
            began_s = time.monotonic()
            while group_lives(group) and time.monotonic() - began_s < GONE_S:
                await asyncio.sleep(POLL_S)
            return time.monotonic() - began_s

        seconds = await under_load(context, serving, kill_it)
    finally:
        agent.kill()
        agent.wait()
    context.findings.figure("until the rollout engine was gone", seconds, "s", 1)
    context.findings.check("the rollout engine ended with its agent", not group_lives(group), f"within {seconds:.1f} s")


async def _group_of(agent: subprocess.Popen[bytes]) -> int:
    """Return the process group of the agent's rollout engine, once it has run a step. Raises Unavailable."""
    assert agent.stdout is not None
    line = await asyncio.to_thread(agent.stdout.readline)
    if not line.startswith(b"group "):
        raise Unavailable("the agent did not start a rollout engine")
    return int(line.split()[1])
