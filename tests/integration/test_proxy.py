"""Routing by the real HAProxy: sessions find the shard that `core.shard_placement` says, and nothing else gets in."""

from __future__ import annotations

import asyncio
import base64
import random
import string
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from aiohttp import web
from tests.integration.proxy import free_port, needs_haproxy, proxy
from yarl import URL

from rose.api.requests import SESSION_HEADER
from rose.api.worker_messages import CONNECT_PATH
from rose.core.shard_placement import group_of, shard_of
from rose.gateway.gateway_service import ROUTES

pytestmark = [pytest.mark.slow, needs_haproxy]

SECRET = "abcdefghijklmnop_-09"
Ask = Callable[..., Awaitable[tuple[int, Any]]]


@asynccontextmanager
async def shards(count: int = 2) -> AsyncIterator[tuple[list[int], list[web.AppRunner]]]:
    """Servers that answer with their number and the path that they were asked for."""
    ports, runners = [], []
    for number in range(count):

        async def handle(request: web.Request, number: int = number) -> web.StreamResponse:
            if request.headers.get("Upgrade") == "websocket":
                connection = web.WebSocketResponse()
                await connection.prepare(request)
                await connection.send_json([number, request.path])
                await connection.close()
                return connection
            await request.read()
            return web.json_response([number, request.path])

        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application)
        await runner.setup()
        ports.append(free_port())
        await web.TCPSite(runner, "127.0.0.1", ports[-1]).start()
        runners.append(runner)
    try:
        yield ports, runners
    finally:
        for runner in runners:
            await runner.cleanup()


def tell(story: Callable[[Ask, str, list[web.AppRunner]], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with shards() as (ports, runners), aiohttp.ClientSession() as http:
            with proxy(*ports) as url:

                async def ask(method: str, path: str, **options: Any) -> tuple[int, Any]:
                    async with http.request(method, URL(url + path, encoded=True), **options) as reply:
                        return reply.status, await reply.json() if reply.content_type == "application/json" else None

                async with asyncio.timeout(30):
                    while (await ask("GET", "/health"))[0] != 200:  # the proxy has not checked its servers yet
                        await asyncio.sleep(0.05)
                await story(ask, url, runners)

    asyncio.run(whole())


def sessions(count: int) -> list[str]:
    chance = random.Random(1)
    letters = string.ascii_letters + string.digits + "-_.:~+ ,%"
    names = ["".join(chance.choices(letters, k=chance.randint(1, 40))).strip() or "x" for _ in range(count)]
    return [name + chance.choice(["", f"/{chance.randrange(9)}", f".{SECRET}", f"/0.{SECRET}"]) for name in names]


def test_every_way_to_name_a_session_leads_to_its_shard() -> None:
    async def story(ask: Ask, url: str, runners: list[web.AppRunner]) -> None:
        seen = set()
        for session in sessions(300):
            shard, coded = shard_of(group_of(session), 2), quote(session, safe="")
            seen.add(shard)
            chat = "/v1/chat/completions"
            basic = base64.b64encode(f"user:TOKEN/{session}".encode()).decode()
            for path, headers in (
                (chat, {SESSION_HEADER: session}),
                (f"/sessions/{coded}{chat}", {}),
                (f"/v1/trajectories/{coded}/finish", {}),
                (chat, {"Authorization": f"Bearer TOKEN/{session}"}),
                (chat, {"Authorization": f"Basic {basic}"}),
                ("/v1/messages", {"X-API-Key": f"TOKEN/{session}"}),
                (f"/sessions/{coded}/v1/messages/count_tokens", {}),
                ("/v1/responses", {"Authorization": f"Bearer TOKEN/{session}"}),
                (f"/sessions/{coded}/v1/responses", {}),
            ):
                status, answer = await ask("POST", path, headers=headers, data=b"{}")
                assert (status, answer and answer[0]) == (200, shard), (session, path, headers)
        assert seen == {0, 1}

    tell(story)


def test_a_trajectory_is_begun_on_the_shard_of_its_group() -> None:
    async def story(ask: Ask, url: str, runners: list[web.AppRunner]) -> None:
        for number in range(30):
            body = {"id": f"run/{number}/3", "group": f"run/{number}"}
            assert (await ask("POST", "/v1/trajectories", json=body))[1][0] == shard_of(f"run/{number}", 2)
        assert (await ask("POST", "/v1/trajectories", json={"id": "alone"}))[1][0] == shard_of("alone", 2)
        for body in ({"group": "run/1"}, {"id": "run/1-0", "group": "run/1"}, {"id": "a", "group": "b"}):
            assert (await ask("POST", "/v1/trajectories", json=body))[0] == 400, body

    tell(story)


def test_only_routes_of_agents_and_devices_are_open() -> None:
    closed = {"/v1/batches/next", "/v1/versions", "/v1/pool", "/v1/pool/{worker}/drain", "/metrics", "/v1/shard"}
    closed |= {"/v1/pool/orders", "/ui", "/ui/events", "/ui/trajectories", "/ui/trajectories/{trajectory:.+}"}

    async def story(ask: Ask, url: str, runners: list[web.AppRunner]) -> None:
        refused = set()
        for route in ROUTES:
            path = route.path
            for name in ("{session}", "{trajectory}", "{worker}", "{model:.+}", "{trajectory:.+}"):
                path = path.replace(name, "x")
            body = {"id": "x/0", "group": "x"} if path == "/v1/trajectories" else {}
            for prefix in ("", "/shards/1"):
                status, answer = await ask(route.method, prefix + path, json=body)
                if status == 404:
                    refused.add(route.path)
                else:
                    assert status == 200 and answer[1] == path and (not prefix or answer[0] == 1), (route, answer)
        assert refused >= closed and not any("session" in path or "models" in path for path in refused)
        assert all(route.roles != ("agent", "trainer") for route in ROUTES if route.path in refused)
        for path in ("/v1/models/../pool", "/v1/%70ool", "//v1/pool", "/shards/0/../../v1/pool", "/shards/7/v1/models"):
            assert (await ask("GET", path))[0] in (400, 404, 503), path

    tell(story)


def test_devices_reach_any_shard_or_the_one_that_they_name() -> None:
    async def story(ask: Ask, url: str, runners: list[web.AppRunner]) -> None:
        async with aiohttp.ClientSession() as http:
            for path, shard in ((f"/shards/0{CONNECT_PATH}", 0), (f"/shards/1{CONNECT_PATH}", 1)):
                async with http.ws_connect(url + path) as connection:
                    assert await connection.receive_json() == [shard, CONNECT_PATH]
            async with http.ws_connect(url + CONNECT_PATH) as connection:
                assert (await connection.receive_json())[1] == CONNECT_PATH

    tell(story)


def test_no_other_shard_answers_for_one_that_is_away() -> None:
    async def story(ask: Ask, url: str, runners: list[web.AppRunner]) -> None:
        groups = {shard_of(f"g{number}", 2): f"g{number}" for number in range(20)}
        await runners[1].cleanup()
        async with asyncio.timeout(30):
            while (await ask("POST", "/v1/completions", headers={SESSION_HEADER: groups[1]}))[0] != 503:
                await asyncio.sleep(0.1)
        assert (await ask("POST", "/v1/completions", headers={SESSION_HEADER: groups[0]}))[0] == 200
        assert (await ask("GET", "/health"))[0] == 200

    tell(story)
