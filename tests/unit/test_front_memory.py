"""What a request held is free as soon as it is answered, without the collector, and goes back to the system."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from typing import Any

import pytest
from aiohttp import web
from tests.unit.front_world import front_world

from rose.front import offload
from rose.front.connections import Connection
from rose.front.context import INLINE_BYTES
from rose.front.generation import Choice, Piece
from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset

MESSAGES = [{"role": "user", "content": "x"}]
HELD = (Choice, Piece, Connection, web.BaseRequest)
NOT_HTTP = b"GET / HTTP/9.9\xff\r\n\r\n"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "x", "max_tokens": 4, "logprobs": 1}),
    "conversation": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "logprobs": True}),
    "a route that does not exist": ("/nothing", {}),
    "a wrong body": ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    "tokens": ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "logprobs": 1}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("model") / "qwen3-3m", seed=0))


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
            gc.disable()
            try:
                for _ in range(3):
                    await world.post(path, body)
                    status, _ = await world.send(NOT_HTTP)
                    assert status == 400
                    await leave(world.port)
                await asyncio.sleep(0.05)  # until the server has seen the ends of the connections
                return [type(found).__name__ for found in gc.get_objects() if isinstance(found, HELD)]
            finally:
                gc.enable()

    assert asyncio.run(ask()) == []


def test_memory_of_large_requests_is_returned_once_for_many(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[None] = []
    monkeypatch.setattr(offload, "trim_heap", lambda: trimmed.append(None))
    monkeypatch.setattr(offload, "RELEASE_S", 0.2)
    monkeypatch.setattr(offload, "_release_due_s", 0.0)

    async def ask(prompt_characters: int, times: int, until: int) -> None:
        async with front_world(folder) as world:
            for _ in range(times):
                await world.post("/v1/completions", {"prompt": "x" * prompt_characters, "max_tokens": 1})
            async with asyncio.timeout(30):
                while len(trimmed) < until:
                    await asyncio.sleep(0.01)

    asyncio.run(ask(10, times=3, until=0))
    assert not trimmed
    asyncio.run(ask(INLINE_BYTES + 1, times=2, until=1))
    assert 1 <= len(trimmed) <= 2


def test_trimming_returns_what_freed_buffers_leave_in_the_heap() -> None:
    """In a process of its own, set up as a server is."""
    program = """
from pathlib import Path
from rose.front.loops import settle_process, trim_heap
def resident_kb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4
settle_process()
buffers = [bytes(600) for _ in range(100_000)]  # too large for Python's own allocator
held = buffers[::500]
del buffers
before_kb = resident_kb()
trim_heap()
print(before_kb - resident_kb())
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(said) > 30_000
