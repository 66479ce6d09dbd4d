"""Run `rose lend vllm`: the rollout engine, the operator's routes and the agent, until the operator ends it.

The routes have the commands and the status that `rose lend` knows of any device. They listen on the loopback, or where
`--owner-host` says, in this process, since the serving port is vLLM's own. On the loopback `/metrics` needs no token;
elsewhere it takes the owner's token or ROSE_METRICS_TOKEN, which opens nothing else. `drain` returns the engine's
KV memory to the machine, and `remove` no more than that: vLLM keeps the weights as long as the engine runs.

Beside a serving engine on a CPU everything but the rollout engine avoids the device's cores, if there are others:
fetching and checking new weights is work too, and a core that serves has no time for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from rose.core.lending_state import REMOVED, after_command
from rose.device.admin_routes import ACTIONS, READER, ControlBody, mirror_lending
from rose.device.device_registry import DeviceEntry, registered_device
from rose.engines.base import LendingStatus
from rose.errors import ConfigError, RoseError
from rose.gateway.auth import token_for
from rose.observe.metrics import CONTENT_TYPE, Metrics
from rose.openai.access import (
    BRAKE_S,
    OWNER_VARIABLE,
    UNAUTHENTICATED,
    check_any_bearer,
    check_bearer,
    check_distinct,
    optional_token_from,
    token_from,
)
from rose.openai.http_errors import Failure, failure_of
from rose.openai.http_metrics import LABEL, mirror_facts
from rose.openai.http_server import free_port, is_loopback
from rose.openai.response_writing import json_response
from rose.vllm.control_segment import Status
from rose.vllm.engine_process import USABLE, check_engine
from rose.vllm.vllm_agent import VllmEngineClient, VllmLending
from rose.worker.agent import AgentSettings, run_agent

METRICS_VARIABLE = "ROSE_METRICS_TOKEN"  # opens /metrics and nothing else, so that a scraper cannot command the device
WEIGHTS_STAY = replace(REMOVED, text=f"{REMOVED.text}; the engine keeps the weights until `rose lend` ends")


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Address of the operator's routes; port 0 takes a free port."""

    host: str = "127.0.0.1"
    port: int = 0

    def check(self) -> None:
        """Raise ConfigError for an address that other machines reach while no token is set that they could know."""
        if not is_loopback(self.host) and not os.environ.get(OWNER_VARIABLE):
            what = f"--owner-host {self.host} opens the controls to other machines, and {OWNER_VARIABLE} is not set"
            raise ConfigError(
                what, hint=f"export {OWNER_VARIABLE}=$(openssl rand -hex 24), here and where `rose lend` runs"
            )

    def metrics_tokens(self, owner_token: str) -> tuple[str, ...]:
        """Return the tokens that open /metrics; none are needed on the loopback. Raise ConfigError for a weak one."""
        if is_loopback(self.host):
            return ()
        scraper_token = optional_token_from(METRICS_VARIABLE)
        check_distinct({OWNER_VARIABLE: owner_token, METRICS_VARIABLE: scraper_token})
        return tuple(filter(None, (owner_token, scraper_token)))

    def url(self, port: int) -> str:
        """Return the address for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class VllmAdminRoutes:
    """The operator's HTTP routes of one agent."""

    def __init__(self, client: VllmEngineClient, token: str, metrics_tokens: tuple[str, ...] = ()) -> None:
        self._client, self._token, self._metrics_tokens = client, token, metrics_tokens
        self.metrics = metrics = Metrics()
        mirror_lending(metrics, lambda: client.admin_status() if client.status is not None else None)
        mirror_facts(metrics, lambda: client.facts, {LABEL: client.lending.engine.model.name})
        what = "1 while rollout steps may run, 0 while they may not or there is no engine."
        metrics.mirror("gauge", "rose_gate_open", what, lambda: float((client.status or Status(0)).gate_open))
        what = "Times the rollout engine was started again."
        metrics.mirror("counter", "rose_engine_restarts", what, lambda: client.restarts)

    def application(self) -> web.Application:
        """Return the application with the routes."""
        application = web.Application()
        application.add_routes(
            [
                web.get("/rose/lending", self._lending_route),
                web.post("/rose/lending/{action}", self._lending_route),
                web.get("/metrics", self._metrics_route),
            ]
        )
        return application

    async def run_command(self, action: str, body: ControlBody) -> LendingStatus:
        """Carry out one command. Raises RequestRefused for an invalid share, Unavailable if the engine is gone."""
        desired = after_command(self._client.desired, action.replace("-", "_"), body.memory_share, body.compute_share)
        if desired.stop is REMOVED:
            desired = replace(desired, stop=WEIGHTS_STAY)
        await self._client.adopt(desired)
        return self._client.admin_status()

    async def _lending_route(self, request: web.Request) -> web.Response:
        """Answer a command with the status after it, or a request without one with the status."""
        action = request.match_info.get("action")
        try:
            check_bearer(request, self._token)
            if action is None:
                return json_response(self._client.admin_status())
            if action not in ACTIONS:
                raise Failure(404, f"there is no action `{action[:40]}`; there are {', '.join(ACTIONS)}")
            raw = await request.read()
            return json_response(await self.run_command(action, READER.read(raw) if raw else ControlBody()))
        except Failure as failure:
            await asyncio.sleep(BRAKE_S if failure.status == UNAUTHENTICATED else 0.0)
            return failure.response()
        except RoseError as error:
            return failure_of(error).response()

    async def _metrics_route(self, request: web.Request) -> web.Response:
        try:
            if self._metrics_tokens:
                check_any_bearer(request, self._metrics_tokens)
        except Failure as failure:
            await asyncio.sleep(BRAKE_S)
            return failure.response()
        return web.Response(body=self.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def lend(
    lending: VllmLending,
    gateway: str | None = None,
    worker_name: str = "",
    admin: AdminAddress | None = None,
    client_type: type[VllmEngineClient] | None = None,
    labels: Mapping[str, str] | None = None,
) -> int:
    """Lend until SIGINT or SIGTERM, as a worker of the gateway if one is given.

    Raises the reason if the engine is given up.
    """
    engine = lending.engine
    check_engine(engine)
    agent, token = _agent_settings(lending, gateway, worker_name, labels), token_from(OWNER_VARIABLE)
    if lending.serving_url:
        others = USABLE - set(engine.cores) if engine.is_cpu else USABLE
        if others:
            os.sched_setaffinity(0, others)
    admin = admin or AdminAddress()
    admin.check()
    client, stopped = (client_type or VllmEngineClient)(lending), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    routes = VllmAdminRoutes(client, token, admin.metrics_tokens(token))
    try:
        async with _serve_routes(client, routes, token, admin):
            _, starting = await _first_of(stopped.wait(), client.start())
            if not stopped.is_set():
                starting.result()
                print("ready; `rose lend status` tells how lending goes, Ctrl-C ends it", flush=True)
                works: list[Coroutine[Any, Any, Any]] = [stopped.wait(), _until_given_up(client)]
                if agent is not None:
                    works.append(run_agent(client, agent, routes.metrics))
                await _first_of(*works)
        if client.gave_up.done():
            raise client.gave_up.result()
        return 0
    finally:
        await client.close()


@asynccontextmanager
async def _serve_routes(
    client: VllmEngineClient, routes: VllmAdminRoutes, token: str, admin: AdminAddress
) -> AsyncIterator[None]:
    """Serve the operator's routes, also before there is an engine."""
    runner = web.AppRunner(routes.application(), access_log=None)
    await runner.setup()
    port = admin.port or free_port(admin.host)
    await web.TCPSite(runner, admin.host, port).start()
    engine, url = client.lending.engine, admin.url(port)
    print(f"the owner's controls are at {url}", flush=True)
    print(f"figures for Prometheus are at {url}/metrics", flush=True)
    print(f"starting a rollout engine for {engine.model} on {engine.device} ...", flush=True)
    try:
        entry = DeviceEntry(os.getpid(), client.lending.serving_url, str(engine.model), url, url, token, "")
        with registered_device(entry):
            yield
    finally:
        await runner.cleanup()


async def _first_of(*works: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Run works until one has ended and cancel the others. Return all of them as ended tasks."""
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


async def _until_given_up(client: VllmEngineClient) -> None:
    await asyncio.shield(client.gave_up)


def _agent_settings(
    lending: VllmLending, gateway: str | None, worker_name: str, labels: Mapping[str, str] | None = None
) -> AgentSettings | None:
    if gateway is None:
        return None
    token = token_for("worker", gateway.split(",")[0].strip())
    if token is None:
        raise ConfigError(f"the worker token of the gateway at {gateway} is not known", hint="set ROSE_WORKER_TOKEN")
    kind: Any = "borrowed" if lending.serving_url else "dedicated"
    known = gateway, token, lending.engine.model.name, kind, lending.engine.max_sequences, worker_name
    return AgentSettings(*known, labels=labels or {})
