"""`rose lend vllm` as a program: the rollout engine, the owner's routes and the agent, until somebody says stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from rose.engines.vllm.starting import free_port
from rose.errors import ConfigError
from rose.front.devices import DeviceCard, shown
from rose.front.tokens import OWNER_VARIABLE, token_from
from rose.rollout.agent import AgentSettings, run_agent
from rose.rollout.roles import token_for
from rose.rollout.vllm_agent import VllmLending, VllmSeat
from rose.rollout.vllm_owner import VllmOwner


async def lend(lending: VllmLending, gateway: str | None) -> int:
    """Until SIGINT or SIGTERM, or until the engine is given up, which raises why."""
    agent, token = _agent(lending, gateway), token_from(OWNER_VARIABLE)
    seat, stopped = VllmSeat(lending), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    print(f"starting a rollout engine for {lending.engine.model} on {lending.engine.device} ...", flush=True)
    try:
        await _unless(stopped, seat.start())
        if not stopped.is_set():
            await _work(seat, agent, token, stopped)
        if seat.gave_up.done():
            raise seat.gave_up.result()
        return 0
    finally:
        await seat.close()


async def _work(seat: VllmSeat, agent: AgentSettings | None, token: str, stopped: asyncio.Event) -> None:
    """Until somebody says stop, the engine is given up or the gateway sends this worker away."""
    port = free_port()
    runner = web.AppRunner(VllmOwner(seat, token).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    works: list[Coroutine[Any, Any, Any]] = [stopped.wait(), _given_up(seat)]
    if agent is not None:
        works.append(run_agent(seat, agent))
    tasks = {asyncio.create_task(work) for work in works}
    with shown(_card(seat.lending, port, token)):
        print("ready; `rose lend status` tells how lending goes, Ctrl-C ends it", flush=True)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await runner.cleanup()


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


def _card(lending: VllmLending, port: int, token: str) -> DeviceCard:
    url = f"http://127.0.0.1:{port}"
    return DeviceCard(os.getpid(), lending.serving_url, str(lending.engine.model), url, url, token, "")


def _agent(lending: VllmLending, gateway: str | None) -> AgentSettings | None:
    if gateway is None:
        return None
    token = token_for("worker", gateway)
    if token is None:
        raise ConfigError(f"the worker token of the gateway at {gateway} is not known", hint="set ROSE_WORKER_TOKEN")
    kind: Any = "borrowed" if lending.serving_url else "dedicated"
    return AgentSettings(gateway, token, lending.engine.model.name, kind, lending.engine.max_sequences)
