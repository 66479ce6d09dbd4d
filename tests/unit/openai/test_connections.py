"""Connections: their number, silence, clients that do not read, and what a cut one leaves behind."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable

import pytest
from aiohttp import web
from tests.unit.front_world import FrontWorld, front_world, run_with_server

from rose.config.server_settings import FrontSettings
from rose.models.model_folder import ModelFolder
from rose.openai import access, connections
from rose.openai.connections import HttpConnection
from rose.openai.http_server import HttpServer
from rose.openai.loops import loop_factory

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"

KEY = "a-key-of-the-serving-port"
FRAME_BYTES = 10  # a header, a mask of zeros and four bytes
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
CLOSE = bytes((0x88, 0x80, 0, 0, 0, 0))


async def keep_alive(found: FrontWorld, *, key: str | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has asked once and stays."""
    reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
    header = f"Authorization: Bearer {key}\r\n" if key else ""
    path = "/v1/models" if key else "/health"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head
    await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
    return reader, writer


def sleeper(port: int, body: bytes, path: str = COMPLETIONS) -> socket.socket:
    """A client that asks for much and reads nothing."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    found.sendall(head.encode() + body)
    return found


async def until_cut(found: socket.socket) -> None:
    found.setblocking(False)
    async with asyncio.timeout(30):
        while not found.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            await asyncio.sleep(0.02)
    found.close()


MUCH = b'{"prompt":[1],"n":16,"max_tokens":1000,"logprobs":20%s}'


def test_idle_connections_of_strangers_make_room_and_known_ones_stay(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.0)

    async def story(found: FrontWorld) -> None:
        known = [await keep_alive(found, key=KEY) for _ in range(2)]
        strangers = [await keep_alive(found) for _ in range(2)]
        newcomers = [await keep_alive(found, key=KEY) for _ in range(2)]
        for reader, _ in strangers:
            assert await reader.read() == b"", "closed"
        assert not any(reader.at_eof() for reader, _ in known)
        reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
        assert b"too_many_connections" in await reader.read(), "all places belong to known clients"
        for _, writer in known + strangers + newcomers:
            writer.close()

    run_with_server(folder, story, api_key=KEY, most=4)


def test_a_refused_connection_makes_room_while_it_waits(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.0)
    monkeypatch.setattr(access, "BRAKE_S", 60.0)

    async def story(found: FrontWorld) -> None:
        guesses = [await asyncio.open_connection("127.0.0.1", found.port) for _ in range(2)]
        for _, writer in guesses:
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer guess\r\n\r\n")
        for _ in range(20):
            await asyncio.sleep(0.01)
        honest = [await keep_alive(found, key=KEY) for _ in range(2)]
        for _, writer in guesses + honest:
            writer.close()

    run_with_server(folder, story, api_key=KEY, most=2)


@pytest.mark.parametrize("more", [b"", b',"stream":true'])
def test_a_client_that_does_not_read_is_cut_off(folder: ModelFolder, more: bytes) -> None:
    async def story(found: FrontWorld) -> None:
        await until_cut(sleeper(found.port, MUCH % more))
        assert (await found.ask("GET", "/health"))[0] == 200

    run_with_server(folder, story, FrontSettings(slow_reader_s=0.2))


def test_a_client_that_reads_slowly_gets_everything(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        loop, text = asyncio.get_running_loop(), "x" * 400_000
        body = b'{"prompt":"%s","return_token_strs":true}' % text.encode()  # the answer is one write of megabytes
        slow = await asyncio.to_thread(sleeper, found.port, body, "/tokenize")
        slow.setblocking(False)
        said = b""
        while b"\r\n\r\n" not in said:
            said += await loop.sock_recv(slow, 100)
        head, _, begin = said.partition(b"\r\n\r\n")
        left = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]) - len(begin)
        while left:
            wanted = min(left, 1 << 18)
            left -= wanted
            while wanted:
                count = len(await loop.sock_recv(slow, wanted))
                assert count, "cut off"
                wanted -= count
            await asyncio.sleep(0.1)
        slow.close()

    run_with_server(folder, story, FrontSettings(slow_reader_s=0.3))


def test_what_waits_for_clients_is_bounded_over_all_of_them(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNSENT_BYTES_MAX", 1 << 18)

    async def story(found: FrontWorld) -> None:
        sleepers = [sleeper(found.port, MUCH % b"") for _ in range(4)]
        waiting = [asyncio.create_task(until_cut(each)) for each in sleepers]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert all(task.exception() is None for task in done), "whichever fell behind first is cut"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for each in sleepers:
            each.close()

    run_with_server(folder, story, FrontSettings(slow_reader_s=600))


def test_a_connection_leaves_no_timer_behind(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        made: list[HttpConnection] = []
        keep = HttpConnection.connection_made

        def note(connection: HttpConnection, transport: asyncio.BaseTransport) -> None:
            made.append(connection)
            keep(connection, transport)

        HttpConnection.connection_made = note  # type: ignore[method-assign]
        try:
            await found.ask("GET", "/health")
            async with asyncio.timeout(10):
                while made[0].transport is not None:
                    await asyncio.sleep(0.01)
        finally:
            HttpConnection.connection_made = keep  # type: ignore[method-assign]
        assert made[0]._silence_timer is not None and made[0]._silence_timer.cancelled()

    run_with_server(folder, story)


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


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, loop_factory()], ids=["asyncio", "as servers"])
@pytest.mark.parametrize("is_early", [True, False], ids=["with the handshake", "after it"])
def test_many_short_frames_are_parsed_in_pieces(
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None, is_early: bool
) -> None:
    count, most = (
        100_000,
        2 * connections.PARSED_BYTES_AT_ONCE // FRAME_BYTES + 1,
    )
    frames = b"".join(bytes((0x82, 0x84, 0, 0, 0, 0)) + number.to_bytes(4, "big") for number in range(count))

    async def story() -> None:
        loop, received, per_turn, turn = asyncio.get_running_loop(), [], Counter[int](), [0]

        def next_turn() -> None:
            turn[0] += 1
            loop.call_soon(next_turn)

        async def receive(request: web.Request) -> web.StreamResponse:
            socket_ = web.WebSocketResponse()
            await socket_.prepare(request)
            async for frame in socket_:
                received.append(int.from_bytes(frame.data, "big"))
                per_turn[turn[0]] += 1
            return socket_

        application = web.Application()
        application.router.add_get("/", receive)
        server = HttpServer(application, FrontSettings(), "rose.test", 8)
        listener = socket.create_server(("127.0.0.1", 0))
        await server.listen(listener)
        next_turn()
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        writer.write(UPGRADE if not is_early else UPGRADE + frames)
        await reader.readuntil(b"\r\n\r\n")
        writer.write((frames if not is_early else b"") + CLOSE)
        await reader.read()
        writer.close()
        await server.close()
        assert received == list(range(count))
        assert max(per_turn.values()) <= most

    with asyncio.Runner(loop_factory=make_loop) as runner:
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
