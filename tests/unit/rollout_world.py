"""A gateway and its workers in one process and one event loop: real HTTP and WebSockets, scripted engines."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
from tests.e2e.scripted_engine import ScriptedEngine

from rose.config.device import EngineSettings
from rose.config.gateway import GatewaySettings
from rose.coserve import messages
from rose.coserve.mailbox import Mailbox
from rose.engines.base import Budget, EngineFacts, Request, TokenEvent
from rose.errors import RoseError, Unavailable
from rose.front.application import InFlight
from rose.front.connections import HttpServer
from rose.models.folder import ModelFolder
from rose.rollout.agent import AgentSettings, run_agent
from rose.rollout.application import application
from rose.rollout.gateway import Gateway, build_gateway
from rose.rollout.roles import Tokens

TOKENS = Tokens(
    agent="an-agents-token", worker="a-workers-token", trainer="a-trainers-token", operator="an-operators-token"
)
PATIENCE_S = 20.0
LENDING = messages.LendingStatus(
    state="lending", why="", mode="decode", model="resident", model_bytes=0, activation_s=None, parking_s=None,
    running=0, waiting=0, lent_steps=0, lent_tokens=0, lent_s=0.0, evictions=0, evicted_tokens=0, breaches={},
    doubtful=0, breaker_trips=0, page_bytes=1, pages=100, rollout_pages=0, rollout_pages_max=0, serving_pages=25,
    headroom_pages=0, memory_state="open", lending_stretch=1.0, memory_share=1.0, compute_share=1.0, slack_s=0.2,
)  # fmt: skip


class LoopEngine:
    """A scripted engine stepped by the event loop, as an agent sees it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.on_step: Callable[[messages.Stepped], None] = lambda stepped: None
        self.on_lending: Callable[[], None] = lambda: None
        self.lending_status: messages.LendingStatus | None = None
        self.trouble: Unavailable | None = None
        self.refusal: RoseError | None = None  # of every request, if set
        self._engine = ScriptedEngine(EngineSettings())
        self._mailboxes: dict[str, Mailbox] = {}
        self._staged: str | None = None
        self._work = asyncio.Event()
        self._stepping = asyncio.create_task(self._step_for_ever(step_s))

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts()

    @property
    def requests(self) -> int:
        return len(self._mailboxes)

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        mailbox = Mailbox()
        for request in requests:
            if self.refusal is not None:
                raise self.refusal
            self._engine.add(request)
            self._mailboxes[request.request_id] = mailbox
        self._work.set()
        return mailbox

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            self._mailboxes.pop(request_id, None)
            self._engine.cancel(request_id)

    async def ask(self, command: messages.Command) -> messages.Reply:
        match command:
            case messages.Evict():
                self._engine.evict(command.request_id)
                self._tell([TokenEvent(command.request_id, (), (), self.facts.version, "abort")])
            case messages.Stage():
                self._staged = self._engine.stage(command.version, command.folder)
            case messages.Commit():
                assert self._staged == command.version
                self._engine.swap(command.version)
            case messages.Want():
                await self._want(command.is_wanted)
        return messages.Reply(1, self.facts)

    def lend(self, **changes: Any) -> None:
        """As a lent device does when something about its lending has changed."""
        before = self.lending_status if self.lending_status is not None else LENDING
        self.lending_status = msgspec.structs.replace(before, **changes)
        self.on_lending()

    async def _want(self, is_wanted: bool) -> None:
        if is_wanted:
            self.lend(state="lending", model="resident", why="")
        else:
            await self.ask_evict_all()
            self.lend(state="parked", model="parked", why="there is no work")

    def die(self, why: str) -> None:
        """As when the engine process is killed and started again."""
        for request_id, mailbox in list(self._mailboxes.items()):
            self._engine.cancel(request_id)
            mailbox.fail(Unavailable(why))
        self._mailboxes.clear()

    async def ask_evict_all(self) -> None:
        for request_id in list(self._mailboxes):
            await self.ask(messages.Evict(request_id))

    async def close(self) -> None:
        self._stepping.cancel()
        with suppress(asyncio.CancelledError):
            await self._stepping

    async def _step_for_ever(self, step_s: float) -> None:
        while True:
            plan = self._engine.plan(Budget(512, 64))
            if plan is None:
                self._work.clear()
                await self._work.wait()
                continue
            self._tell(self._engine.step(plan))
            await asyncio.sleep(step_s)

    def _tell(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is not None:
                mailbox.put(event)
                if event.finish_reason is not None:
                    del self._mailboxes[event.request_id]
        self.on_step(messages.Stepped(tuple(events), self.facts))


class World:
    def __init__(self, gateway: Gateway, url: str) -> None:
        self.gateway, self.url = gateway, url
        self.http: aiohttp.ClientSession
        self._agents: dict[str, asyncio.Task[None]] = {}
        self._engines: list[LoopEngine] = []

    async def worker(self, label: str, *, step_s: float = 0.0, **changes: Any) -> LoopEngine:
        """A worker that has joined, unless it is an unusual one."""
        engine = LoopEngine(step_s)
        known = AgentSettings(self.url, TOKENS.worker, self.gateway.front.model_name, "dedicated", 64, label)
        self._engines.append(engine)
        self._agents[label] = asyncio.create_task(run_agent(engine, replace(known, **changes)))
        if not changes:
            await eventually(lambda: self.gateway.pool.get(label) is not None)
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
    listener = socket.create_server(("127.0.0.1", 0))
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
            gateway.books.ledger.close()


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that happens by itself; how long it takes is not the point."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)
