"""A gateway and its workers in one process and one event loop: real HTTP and WebSockets, scripted engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
from tests.fake_engine import FakeEngine
from tests.integration.scripted_engine import ScriptedEngine

from rose.config.server_settings import EngineSettings, GatewaySettings
from rose.engines.base import LendingStatus, Request
from rose.engines.token_stream import TokenSink
from rose.errors import RoseError
from rose.gateway.auth import RoleTokens
from rose.gateway.gateway_server import Gateway, build_gateway
from rose.gateway.gateway_service import application
from rose.models.model_folder import ModelFolder
from rose.openai.http_server import HttpServer, InFlight
from rose.worker.agent import AgentSettings, run_agent

TOKENS = RoleTokens(
    agent="an-agents-token", worker="a-workers-token", trainer="a-trainers-token", operator="an-operators-token"
)
PATIENCE_S = 20.0
LENDING = LendingStatus(
    state="lending", why="", mode="decode", model="resident", model_bytes=0, activation_s=None, parking_s=None,
    running=0, waiting=0, lent_steps=0, lent_tokens=0, lent_s=0.0, evictions=0, evicted_tokens=0, breaches={},
    breaker_trips=0, page_bytes=1, pages=100, rollout_pages=0, rollout_pages_max=0, serving_pages=25,
    headroom_pages=0, memory_state="open", lending_stretch=1.0, memory_share=1.0, compute_share=1.0, slack_s=0.2,
)  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = [1, 2, 3]


class LoopEngine(FakeEngine):
    """A scripted engine stepped by the event loop, as an agent sees it."""

    def __init__(self, step_s: float = 0.0, *, waiting_max: int = EngineSettings().max_waiting) -> None:
        self.scripted = ScriptedEngine(EngineSettings(max_waiting=waiting_max))
        super().__init__(self.scripted, step_s)
        self.refusal: RoseError | None = None  # of every request, if set

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        if self.refusal is not None:
            raise self.refusal
        super().submit(requests, sink)

    def lend(self, **changes: Any) -> None:
        """As a lent device does when something about its lending has changed."""
        before = self.lending_status if self.lending_status is not None else LENDING
        self.lending_status = msgspec.structs.replace(before, **changes)
        self.events.lending.publish(self.lending_status)

    async def set_wanted(self, is_wanted: bool) -> None:
        if is_wanted:
            self.lend(state="lending", model="resident", why="")
        else:
            await self.evict_all()
            self.lend(state="parked", model="parked", why="there is no work")

    async def evict_all(self) -> None:
        for request_id in list(self._sinks):
            await self.evict(request_id)


class World:
    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway, self.url = gateway, url
        self.http: aiohttp.ClientSession
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._engines: list[LoopEngine] = []

    async def worker(self, label: str, *, step_s: float = 0.0, **changes: Any) -> LoopEngine:
        """A worker that has joined, unless it is an unusual one."""
        engine = LoopEngine(step_s)
        known = AgentSettings(self.url, TOKENS.worker, self.gateway.context.model_name, "dedicated", 64, label)
        self._engines.append(engine)
        self._agents[label] = asyncio.create_task(run_agent(engine, replace(known, **changes)))
        if not changes:
            await eventually(lambda: self.gateway.core.pool.get(label) is not None)
        return engine

    def agent(self, label: str) -> asyncio.Task[None]:
        return self._agents[label]

    async def stop(self, name: str) -> None:
        """Its agent is gone from one moment to the next."""
        task = self._agents.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def ask(
        self, method: str, path: str, body: Any = None, *, session: str | None = None, token: str = TOKENS.trainer
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"} | ({"X-Session-ID": session} if session else {})
        async with self.http.request(method, self.url + path, json=body, headers=headers) as reply:
            is_json = reply.content_type == "application/json"
            return reply.status, await (reply.json() if is_json else reply.read())

    async def turn(self, token_ids: Sequence[int], session: str | None = None, **sampling: Any) -> dict[str, Any]:
        status, reply = await self.ask("POST", "/inference/v1/generate", _turn(token_ids, sampling), session=session)
        assert status == 200, reply
        found: dict[str, Any] = reply["choices"][0]
        return found

    async def refused(self, token_ids: Sequence[int], session: str | None = None, **sampling: Any) -> int:
        status, _ = await self.ask("POST", "/inference/v1/generate", _turn(token_ids, sampling), session=session)
        assert status != 200
        return status

    async def close(self) -> None:
        for name in list(self._agents):
            await self.stop(name)
        for engine in self._engines:
            await engine.close()


def _turn(token_ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
    return {"token_ids": list(token_ids), "sampling_params": {"logprobs": 1, "ignore_eos": True} | sampling}


@asynccontextmanager
async def world(folder: ModelFolder, **changes: Any) -> AsyncIterator[World]:
    settings = replace(GatewaySettings(beat_s=0.1, lease_s=2.0), **changes)
    gateway = build_gateway(folder, settings)
    server = HttpServer(application(gateway, TOKENS, InFlight()), settings, "rose.test", settings.max_connections)
    listener = socket.create_server(("127.0.0.1", changes.get("port", 0)))
    await server.listen(listener)
    found = World(gateway, f"http://127.0.0.1:{listener.getsockname()[1]}")
    ticking = asyncio.create_task(gateway.tick_for_ever())
    async with aiohttp.ClientSession() as found.http:
        try:
            yield found
        finally:
            ticking.cancel()
            await found.close()
            await server.close()
            gateway.core.ledger.close()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that happens by itself; how long it takes is not the point."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


Story = Callable[[World], Awaitable[None]]


def tell(folder: ModelFolder, story: Story, **changes: Any) -> None:
    async def whole() -> None:
        async with world(folder, **changes) as found:
            await story(found)

    asyncio.run(whole())


def scripted(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append((ids[-1] + len(ids)) % 264)
    return ids[len(prompt) :]
