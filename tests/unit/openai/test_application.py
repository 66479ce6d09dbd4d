"""The application of a device: what every request goes through."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from aiohttp import web
from tests.unit.front_world import FrontWorld, front_world, run_with_server

from rose.config.server_settings import FrontSettings
from rose.models.model_folder import ModelFolder
from rose.openai.connections import HttpConnection
from rose.openai.generation import Choice, ChoiceDelta

MESSAGES = [{"role": "user", "content": "x"}]

HELD = (Choice, ChoiceDelta, HttpConnection, web.BaseRequest)

NOT_HTTP = b"GET / HTTP/9.9\xff\r\n\r\n"

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x", "max_tokens": 4, "logprobs": 1}),
    "conversation": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "logprobs": True}),
    "a route that does not exist": ("/nothing", {}),
    "a wrong body": ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    "tokens": ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "logprobs": 1}}),
}


async def leave(port: int) -> None:
    """Ask, say something that is not HTTP, and go without reading."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + NOT_HTTP)
    await writer.drain()
    writer.transport.abort()


@pytest.mark.parametrize("what", BODIES)
def test_an_answered_request_leaves_no_reference_cycle(what: str, folder: ModelFolder) -> None:
    async def ask() -> list[str]:
        path, body = BODIES[what]
        async with front_world(folder) as world:
            gc.collect()
            before = [found for found in gc.get_objects() if isinstance(found, HELD)]  # of other tests
            known = set(map(id, before))
            gc.disable()
            try:
                for _ in range(3):
                    await world.post(path, body)
                    status, _ = await world.send(NOT_HTTP)
                    assert status == 400
                    await leave(world.port)
                await asyncio.sleep(0.05)  # until the server has seen the ends of the connections
                held = [found for found in gc.get_objects() if isinstance(found, HELD)]
                return [type(found).__name__ for found in held if id(found) not in known]
            finally:
                gc.enable()

    assert asyncio.run(ask()) == []


def test_a_server_that_shuts_down_refuses_new_requests(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        world.in_flight.draining = True
        status, answer = await world.ask("GET", "/health")
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert world.in_flight.count == 0

    run_with_server(folder, story)


def test_what_aiohttp_refuses_has_the_shape_of_every_error(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        assert (await world.ask("GET", "/nothing"))[1]["error"]["message"].startswith("there is no such route")
        status, answer = await world.ask("GET", "/v1/completions")
        assert status == 405 and "use POST" in answer["error"]["message"]
        big = b'{"prompt":"' + b"x" * FrontSettings().max_body_bytes + b'"}'
        assert (await world.post("/v1/completions", big))[0] == 413

    run_with_server(folder, story)


def test_a_bug_in_a_handler_is_logged_and_becomes_a_500(folder: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: FrontWorld) -> None:
        world.engine.facts = None  # type: ignore[assignment]
        status, answer = await world.ask("GET", "/v1/models")
        assert (status, answer["error"]["type"]) == (500, "internal_error")

    run_with_server(folder, story)
    assert "GET /v1/models failed" in caplog.text
