"""A connection without a request is cut, but not for what its server was late with."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from tests.unit.front_world import front_world

from rose.config.device import FrontSettings
from rose.front.loops import loop_factory
from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("model") / "qwen3-3m", seed=0))


def test_a_request_that_came_while_the_loop_was_held_up_is_answered(folder: ModelFolder) -> None:
    """Which of timers and sockets a loop serves first after that differs: this is the loop that servers run."""

    async def story() -> None:
        async with front_world(folder, FrontSettings(read_timeout_s=0.2)) as found:
            client = socket.create_connection(("127.0.0.1", found.port))
            await asyncio.sleep(0.05)  # the server has the connection
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            time.sleep(0.5)  # the loop is held up
            client.setblocking(False)
            said = await asyncio.get_running_loop().sock_recv(client, 100)
            client.close()
            assert said.startswith(b"HTTP/1.1 200"), "it was there in time"

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(story())


def test_a_silent_connection_is_cut(folder: ModelFolder) -> None:
    async def story() -> None:
        async with front_world(folder, FrontSettings(read_timeout_s=0.1)) as found:
            reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
            async with asyncio.timeout(30):
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            writer.close()

    asyncio.run(story())
