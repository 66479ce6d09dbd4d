"""`rose lend vllm` as a program: the rollout engine, the owner's routes and the agent, until somebody says stop.

Beside a serving engine on a CPU all of it but the rollout engine itself keeps off the device's cores, if there are
others: fetching and checking new weights is work too, and a core that serves has no time for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from rose.engines.vllm.starting import USABLE, RolloutEngine, check
from rose.errors import ConfigError
from rose.front.devices import DeviceCard, shown
from rose.front.tokens import OWNER_VARIABLE, token_from
from rose.launch.processes import free_port
from rose.observe.metrics import Metrics
from rose.rollout.agent import AgentSettings, run_agent
from rose.rollout.roles import token_for
from rose.rollout.vllm_agent import VllmLending, VllmSeat
from rose.rollout.vllm_owner import VllmOwner


@dataclass(frozen=True, slots=True)
class Doors:
    """Which gateway to work for, under what name, and where the owner is listened to; 0 takes a free port."""

    gateway: str | None = None
    worker_name: str = ""
    owner_port: int = 0


async def lend(lending: VllmLending, doors: Doors) -> int:
    """Until SIGINT or SIGTERM, or until the engine is given up, which raises why."""
    check(lending.engine)
    agent, token = _agent(lending, doors), token_from(OWNER_VARIABLE)
    if lending.serving_url:
        _keep_off(lending.engine)
    seat, stopped = VllmSeat(lending), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    owner = VllmOwner(seat, token)
    try:
        async with _owners_door(seat, owner, token, doors.owner_port or free_port()):
            await _unless(stopped, seat.start())
            if not stopped.is_set():
                await _work(seat, agent, stopped, owner.metrics)
        if seat.gave_up.done():
            raise seat.gave_up.result()
        return 0
    finally:
        await seat.close()


@asynccontextmanager
async def _owners_door(seat: VllmSeat, owner: VllmOwner, token: str, port: int) -> AsyncIterator[None]:
    """Open before there is an engine: its owner may be asked, or say something, at any time."""
    runner = web.AppRunner(owner.application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine, url = seat.lending.engine, f"http://127.0.0.1:{port}"
    print(f"the owner's controls are at {url}", flush=True)
    print(f"figures for Prometheus are at {url}/metrics", flush=True)
    print(f"starting a rollout engine for {engine.model} on {engine.device} ...", flush=True)
    try:
        with shown(DeviceCard(os.getpid(), seat.lending.serving_url, str(engine.model), url, url, token, "")):
            yield
    finally:
        await runner.cleanup()


async def _work(seat: VllmSeat, agent: AgentSettings | None, stopped: asyncio.Event, metrics: Metrics) -> None:
    """Until somebody says stop, the engine is given up or the gateway sends this worker away."""
    works: list[Coroutine[Any, Any, Any]] = [stopped.wait(), _given_up(seat)]
    if agent is not None:
        works.append(run_agent(seat, agent, metrics))
    tasks = {asyncio.create_task(work) for work in works}
    print("ready; `rose lend status` tells how lending goes, Ctrl-C ends it", flush=True)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _given_up(seat: VllmSeat) -> None:
    await asyncio.shield(seat.gave_up)


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do it unless told to stop before it is done. Raises what it raises."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopped.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if task.done():
        task.result()
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _keep_off(engine: RolloutEngine) -> None:
    others = USABLE - set(engine.cores) if engine.is_cpu else USABLE
    if others:
        os.sched_setaffinity(0, others)


def _agent(lending: VllmLending, doors: Doors) -> AgentSettings | None:
    gateway = doors.gateway
    if gateway is None:
        return None
    token = token_for("worker", gateway)
    if token is None:
        raise ConfigError(f"the worker token of the gateway at {gateway} is not known", hint="set ROSE_WORKER_TOKEN")
    kind: Any = "borrowed" if lending.serving_url else "dedicated"
    seats, model = lending.engine.max_sequences, lending.engine.model.name
    return AgentSettings(gateway, token, model, kind, seats, doors.worker_name)
