"""A commit of weights pauses the engine, whatever happens meanwhile, and calls go to its socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rose.engines.base import Partial, Request, Sampling
from rose.errors import ModelError, RequestRefused, RoseError, Unavailable
from rose.vllm.control_segment import EngineControl, Status, open_control, open_status
from rose.vllm.vllm_client import GENERATE, REQUEST_PREFIX
from rose.vllm.vllm_engine import VllmEngine

ALL = 1 << 20


class Engine:
    """Applies every control at once, and answers calls as a test says."""

    def __init__(self, folder: Path) -> None:
        self._control, self._status = open_control(folder, create=True), open_status(folder, create=True)
        self._status.write(Status(1, version="old"))
        self.client = VllmEngine(folder / "http", folder, self._control, lambda: True)
        self.client._call = self._call  # type: ignore[method-assign]
        self.failures: dict[str, RoseError] = {}
        self.meanwhile: Callable[[], None] = lambda: None
        self.seen: list[tuple[str, int]] = []  # paths, and tokens granted then
        self.bodies: dict[str, Any] = {}
        self.versions = ["new"]  # that each rank has staged

    @property
    def control(self) -> EngineControl:
        found = self._control.read()[1]
        assert found is not None
        return found

    async def _call(self, path: str, body: Any) -> dict[str, Any]:
        self.meanwhile()
        self.seen.append((path, self.control.tokens))
        self.bodies[path] = body
        if path in self.failures:
            raise self.failures[path]
        return {"results": [{"busy": False, "failure": "", "version": one, "numbers": 1} for one in self.versions]}

    async def apply(self) -> None:
        while True:
            self._status.write(Status(1, done=self._control.number, version="old"))
            await asyncio.sleep(0)


def with_engine(folder: Path, check: Callable[[Engine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = Engine(folder)
        applying = asyncio.create_task(engine.apply())
        try:
            engine.client.write_control(tokens=ALL)
            await engine.client.stage("new", "folder")
            await check(engine)
        finally:
            applying.cancel()
            await engine.client.close()

    asyncio.run(run())


def test_a_commit_pauses_steps_only_while_it_writes(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        await engine.client.commit("new")
        assert engine.seen[1:] == [("/start_weight_update", ALL), ("/update_weights", 0), ("/finish_weight_update", 0)]
        assert (engine.control.tokens, engine.client._version) == (ALL, "new")
        assert engine.client.swap_s is not None
        assert engine.bodies["/update_weights"] == {"update_info": {"version": "new"}}
        assert engine.bodies["/finish_weight_update"] == {"weight_version": "new"}

    with_engine(tmp_path, check)


def test_a_grant_renewed_during_a_commit_waits_for_its_end(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        engine.meanwhile = lambda: engine.client.write_control(tokens=7, until_s=9.0) and None
        await engine.client.commit("new")
        assert [tokens for path, tokens in engine.seen if path != "/start_weight_update"][1:] == [0, 0]
        assert (engine.control.tokens, engine.control.until_s) == (7, 9.0)

    with_engine(tmp_path, check)


def test_a_version_that_one_rank_lacks_is_not_committed(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        engine.versions = ["new", "new"]
        await engine.client.stage("new", "folder")
        engine.versions = ["new", "old"]
        with pytest.raises(ModelError, match="not staged on every rank"):
            await engine.client.commit("new")
        assert "/update_weights" not in engine.bodies
        assert (engine.control.tokens, engine.client._version) == (ALL, "old")

    with_engine(tmp_path, check)


def test_a_rank_that_took_a_version_back_leaves_the_others_unknown(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        engine.versions = ["new", "new"]
        await engine.client.stage("new", "folder")
        engine.failures["/update_weights"] = Unavailable("version `new` was taken back: no room")
        with pytest.raises(Unavailable, match="not known which weights"):
            await engine.client.commit("new")
        assert engine.control.tokens == 0

    with_engine(tmp_path, check)


@pytest.mark.parametrize("words", ["version `new` was taken back: no room", "version `new` is not staged"])
def test_after_an_undone_commit_steps_go_on(tmp_path: Path, words: str) -> None:
    async def check(engine: Engine) -> None:
        engine.failures["/update_weights"] = Unavailable(f"the rollout engine answered 500: {words}")
        with pytest.raises(ModelError, match="version `new`"):
            await engine.client.commit("new")
        assert (engine.control.tokens, engine.client._version) == (ALL, "old")
        with pytest.raises(RequestRefused, match="not staged"):
            await engine.client.commit("new")

    with_engine(tmp_path, check)


@pytest.mark.parametrize(
    "path, words",
    [
        ("/update_weights", "version `new` is half written (no room) and cannot be taken back"),
        ("/update_weights", "the connection was lost"),
        ("/finish_weight_update", "the connection was lost"),
    ],
)
def test_after_a_commit_of_unknown_result_no_step_runs(tmp_path: Path, path: str, words: str) -> None:
    async def check(engine: Engine) -> None:
        engine.failures[path] = Unavailable(words)
        with pytest.raises(Unavailable, match="not known which weights"):
            await engine.client.commit("new")
        engine.client.write_control(tokens=ALL)
        assert engine.control.tokens == 0

    with_engine(tmp_path, check)


def test_calls_go_to_the_socket_whatever_proxy_is_set(tmp_path: Path) -> None:
    """Whatever proxy the environment names."""

    async def check() -> None:
        asked: list[str] = []

        async def called(request: web.Request) -> web.Response:
            asked.append(request.path)
            return web.json_response({"results": [{"busy": False, "failure": "", "version": "new", "numbers": 1}]})

        application = web.Application()
        application.add_routes([web.post("/collective_rpc", called)])
        runner = web.AppRunner(application)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "http")).start()
        control, status = open_control(tmp_path, create=True), open_status(tmp_path, create=True)
        status.write(Status(1, version="old"))
        client = VllmEngine(tmp_path / "http", tmp_path, control, lambda: True)
        try:
            await client.stage("new", "folder")
        finally:
            await client.close()
            await runner.cleanup()
        assert asked == ["/collective_rpc"]

    asyncio.run(check())


@asynccontextmanager
async def served(folder: Path, *routes: web.RouteDef) -> AsyncIterator[VllmEngine]:
    """A client of a stand-in for the engine's HTTP server."""
    application = web.Application()
    application.add_routes(routes)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "http")).start()
    control, status = open_control(folder, create=True), open_status(folder, create=True)
    status.write(Status(1, version="old", max_context_tokens=100))
    client = VllmEngine(folder / "http", folder, control, lambda: True)
    client._control = EngineControl(kv_bytes=1)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


PLACE = {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}
CHUNK = {"choices": [{"token_ids": [7], "logprobs": {"content": [{"logprob": -0.25}]}, "finish_reason": "length"}]}
ABORTED = {"choices": [{"token_ids": [], "finish_reason": "abort"}]}


@pytest.mark.parametrize("how", ["plain", "continued", "aborted", "new weights"])
def test_a_prompt_is_scored_by_a_request_of_its_own_before_the_stream(tmp_path: Path, how: str) -> None:
    async def check() -> None:
        names: list[str] = []

        async def generate(request: web.Request) -> web.Response:
            body = await request.json()
            names.append(body["request_id"])
            if body["stream"]:
                if how == "new weights":  # they came after the prompt was scored
                    client._version = "new"
                return web.Response(text=f"data: {json.dumps(CHUNK)}\n\n")
            return web.json_response(ABORTED if how == "aborted" else CHUNK | {"prompt_logprobs": [None, PLACE]})

        partial = Partial((5,), (-0.5,)) if how == "continued" else Partial()
        asked = Request("r", (1, 2), Sampling(max_tokens=9, prompt_logprobs=1), partial=partial)
        async with served(tmp_path, web.post(GENERATE, generate)) as client:
            if how == "new weights":
                with pytest.raises(Unavailable, match="new weights"):
                    [event async for event in client.generate(asked)]
                return
            [event] = [event async for event in client.generate(asked)]
        assert names == {"plain": ["r-prompt", "r"], "continued": ["r"], "aborted": ["r-prompt"]}[how]
        assert event.finish_reason == ("abort" if how == "aborted" else "length")
        assert event.prompt_logprobs == (((-0.5, 1, ((2, -0.5),)),) if how == "plain" else ())

    asyncio.run(check())


def test_eviction_also_aborts_the_request_that_scores(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        engine.client._live["r"] = None  # type: ignore[assignment]
        await engine.client.evict("r")
        assert engine.bodies["/abort_requests"] == {"request_ids": [f"{REQUEST_PREFIX}r", f"{REQUEST_PREFIX}r-prompt"]}
        del engine.client._live["r"]

    with_engine(tmp_path, check)
