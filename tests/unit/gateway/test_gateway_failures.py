"""What users see when something goes wrong: the rows of docs/failures.md that no other test looks at."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.unit.rollout_world import World, eventually, world

from rose.config.server_settings import FrontSettings
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.openai.http_server import HttpServer

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0))


def tell(folder: ModelFolder, *stories: Callable[[World], Awaitable[None]], **changes: Any) -> None:
    """Each story is another life of the gateway."""

    async def whole() -> None:
        for story in stories:
            async with world(folder, **changes) as found:
                await story(found)

    asyncio.run(whole())


def body(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": prompt, "sampling_params": {"ignore_eos": True} | sampling}


def test_a_gateway_that_was_stopped_goes_on_where_it_was(folder: ModelFolder, tmp_path: Path) -> None:
    answers: list[Any] = []

    async def before(found: World) -> None:
        await found.worker("a", step_s=0.002)
        for name in ("x", "y"):
            begun = {"id": name, "group": "g", "group_size": 2}
            assert (await found.ask("POST", "/v1/trajectories", begun))[0] == 200
            answers.append(await found.turn(PROMPT, name, max_tokens=5))
        assert (await found.ask("POST", "/v1/trajectories/x/finish", {"reward": 1}))[0] == 200
        assert (await found.ask("POST", "/v1/versions", {"version": "v1", "folder": str(folder.path)}))[0] == 200
        asyncio.create_task(found.turn([*PROMPT, 9], "y", max_tokens=500)).add_done_callback(asyncio.Future.exception)
        await eventually(lambda: found.gateway.core.scheduler.counts.tokens > 30)

    async def after(found: World) -> None:
        session = found.gateway.core.trajectories.get("y")
        assert session is not None and len(session.turns[1].produced) >= 20, "what was received is here"
        engine = await found.worker("a")
        assert (await found.turn(PROMPT, "y", max_tokens=5)) == answers[1], "the same answer"
        long = await found.turn([*PROMPT, 9], "y", max_tokens=500)
        assert len(long["token_ids"]) == 500 and engine.facts.generated_tokens < 500, "it did not begin again"
        assert found.gateway.core.pool.newest_version == "v1"
        assert (await found.ask("POST", "/v1/trajectories/x/finish", {"reward": 1}))[0] == 200
        assert (await found.ask("POST", "/v1/trajectories/x/finish", {"reward": 0}))[0] == 409
        assert (await found.ask("POST", "/v1/trajectories/y/finish", {"reward": 0.5}))[0] == 200
        status, batch = await found.ask("GET", "/v1/batches/next?groups=1&wait_s=5")
        assert status == 200
        answers.append(batch)

    async def later(found: World) -> None:
        assert await found.ask("GET", "/v1/batches/next?groups=1&wait_s=5") == (200, answers[-1])
        assert await found.ask("GET", "/v1/batches/next?groups=1&after=1&wait_s=0.1") == (204, b"")

    tell(folder, before, after, later, ledger=str(tmp_path / "ledger.sqlite"))


def test_a_full_disk_is_a_503_with_the_reason(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        await found.turn(PROMPT, "s", max_tokens=3)
        database = found.gateway.core.ledger._database
        database.execute("PRAGMA query_only = ON")
        for _ in range(2):
            status, reply = await found.ask("POST", "/inference/v1/generate", body([7], max_tokens=3), session="s")
            assert status == 503 and "cannot write its ledger" in reply["error"]["message"]
        for path in ("/v1/trajectories", "/v1/trajectories/s/finish"):
            assert (await found.ask("POST", path, {}))[0] == 503
        assert (await found.turn([8], max_tokens=3))["token_ids"], "what need not be kept is answered"
        database.execute("PRAGMA query_only = OFF")
        await eventually(lambda: found.gateway.core.ledger.trouble is None)
        assert len((await found.turn([7], "s", max_tokens=3))["token_ids"]) == 3

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


def test_nobody_there_and_too_long(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        status, reply = await found.ask("POST", "/inference/v1/generate", body(PROMPT, max_tokens=3), session="s")
        assert status == 503 and "no worker has joined" in reply["error"]["message"]
        await found.worker("a")
        long = body([1] * 5000, max_tokens=3)
        status, reply = await found.ask("POST", "/inference/v1/generate", long, session="s")
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"

    tell(folder, story, wait_s=0.1)


def test_a_finished_trajectory_takes_no_turns_even_after_it_was_handed_out(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        assert (await found.ask("POST", "/v1/trajectories", {"id": "x", "group": "g"}))[0] == 200
        await found.turn(PROMPT, "x", max_tokens=2)
        await found.ask("POST", "/v1/trajectories/x/finish", {})
        assert await found.refused(PROMPT, "x", max_tokens=2) == 400
        assert (await found.ask("GET", "/v1/batches/next?groups=1"))[0] == 200
        assert (await found.ask("GET", "/v1/batches/next?groups=1&after=1&wait_s=0.05"))[0] == 204
        assert await found.refused(PROMPT, "x", max_tokens=2) == 400

    tell(folder, story)


@pytest.mark.parametrize("words", [b"", b"POST /v1/trajectories HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_who_never_says_what_it_wants_is_cut_off(words: bytes) -> None:
    async def story() -> None:
        server = HttpServer(web.Application(), FrontSettings(read_timeout_s=0.2), "rose.test", 8)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.listen(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(words)
        said = b""
        async with asyncio.timeout(20):
            with suppress(ConnectionResetError):
                said = await reader.read()
        assert said == b""
        writer.close()
        await server.close()

    asyncio.run(story())


def test_a_body_that_does_not_come_is_a_408(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        host, port = found.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/trajectories HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a-trainers-token\r\n"
        writer.write(f"{head}Content-Length: 10\r\n\r\n{{".encode())
        async with asyncio.timeout(20):
            assert b" 408 " in await reader.readline()
        writer.close()

    tell(folder, story, read_timeout_s=0.2)
