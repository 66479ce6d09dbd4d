"""The relay server: HTTP before another relay, normally a folder on the server's disk (`rose relay up`).

One event loop in a thread of its own speaks HTTP, and worker threads touch the relay behind it. Only one block of each
value is in memory: the server reads from the socket what the disk has taken, and sends what the client has taken. A
writer that is cut off leaves nothing visible.

A large body over plain TCP is read by its worker thread straight from the socket: passing it through aiohttp's parser
takes twice as long as the disk. Its connection is closed afterwards, since the parser cannot follow.

A connection without a valid token lives for `first_token_s` at most, TLS handshake included, and is closed earlier if
`unauthenticated_max` younger ones came. So a flood of strangers delays the first milliseconds of an honest client and
takes no place of authenticated ones. Readers and writers have places of their own.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hmac
import logging
import mmap
import os
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from aiohttp import StreamReader, hdrs, web

from rose.api.authorization import key_of_header
from rose.errors import ConfigError, RequestRefused, RoseError, Unavailable
from rose.weights.keys import write_key
from rose.weights.relay import relay_api
from rose.weights.relay.relay_api import BLOCK_BYTES, SILENCE_S, VALUES_PATH, Role
from rose.weights.relay.relay_base import Buffer, KeyExists, KeyMissing, RangeRefused, Relay, check_key, is_key

CONNECTIONS_MAX = 256  # of each role, so that readers never take the places of the trainer
UNAUTHENTICATED_MAX = 64  # connections that have not shown a token yet
FIRST_TOKEN_S = 5.0  # until the first token, TLS included
IDLE_S = 300.0  # an authenticated connection without a call is closed after this long; clients open another
REFUSAL_DELAY_S = 0.25  # before a wrong token is refused: four guesses a second and connection
CLOSE_S = 5.0  # for calls to end when the server closes
ACCEPT_PAUSE_S = 0.1  # after accept failed, for example for lack of file descriptors
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{0,19})")

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
_http_log = logging.getLogger(f"{__name__}.http")
_http_log.setLevel(logging.CRITICAL)  # aiohttp reports what clients do wrong with a traceback


class RelayServer:
    """A relay on an address; it listens from construction until `close`."""

    def __init__(
        self,
        relay: Relay,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        silence_s: float = SILENCE_S,
        idle_s: float = IDLE_S,
        first_token_s: float = FIRST_TOKEN_S,
        connections_max: int = CONNECTIONS_MAX,
        unauthenticated_max: int = UNAUTHENTICATED_MAX,
    ) -> None:
        self._relay = relay
        keys = write_key(secret)
        self._tokens: dict[Role, bytes] = {
            "reader": keys.read.relay.hex().encode(),
            "writer": keys.relay.hex().encode(),
        }
        self._tls = tls
        self._silence_s, self._idle_s, self._first_token_s = silence_s, idle_s, first_token_s
        self._connections_max, self._unauthenticated_max = connections_max, unauthenticated_max
        self._unauthenticated: dict[web.RequestHandler, socket.socket] = {}  # oldest first
        self._admitted: dict[Role, dict[web.RequestHandler, socket.socket]] = {"reader": {}, "writer": {}}
        self._connecting: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(2 * connections_max, "relay-call")
        self._stopping = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._listener = _listen(host, port)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="relay-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._threads.shutdown()

    def __enter__(self) -> RelayServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Connections

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = web.Server(
            self._answer,
            access_log=None,
            logger=_http_log,
            keepalive_timeout=self._idle_s,
            read_bufsize=BLOCK_BYTES // 4,
            auto_decompress=False,
        )
        accepting = asyncio.create_task(self._accept(server))
        await self._stopping.wait()
        accepting.cancel()
        await asyncio.wait([accepting])
        self._listener.close()
        for connections in (self._unauthenticated, *self._admitted.values()):
            for plain in connections.values():
                _cut(plain)
        await server.shutdown(CLOSE_S)

    async def _accept(self, server: web.Server) -> None:
        while True:
            try:
                plain, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("the relay cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            while len(self._unauthenticated) >= self._unauthenticated_max:
                oldest = next(iter(self._unauthenticated))
                _cut(self._unauthenticated.pop(oldest))
            connection = server()
            self._unauthenticated[connection] = plain
            self._loop.call_later(self._first_token_s, self._cut_unauthenticated, connection)
            task = asyncio.create_task(self._connect(connection, plain))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: web.RequestHandler, plain: socket.socket) -> None:
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_s = self._first_token_s if self._tls is not None else None
            await self._loop.connect_accepted_socket(
                lambda: connection, plain, ssl=self._tls, ssl_handshake_timeout=limit_s
            )
        except OSError:  # the client left, or does not speak TLS
            self._unauthenticated.pop(connection, None)
            plain.close()

    def _cut_unauthenticated(self, connection: web.RequestHandler) -> None:
        plain = self._unauthenticated.pop(connection, None)
        if plain is not None:
            _cut(plain)

    def _admit(self, connection: web.RequestHandler, role: Role) -> bool:
        """Move a connection that has shown a token to the admitted ones, if there is a place."""
        admitted = self._admitted[role]
        if connection in admitted:
            return True
        for closed in [known for known, plain in admitted.items() if plain.fileno() < 0]:
            del admitted[closed]
        if connection not in self._unauthenticated or len(admitted) >= self._connections_max:
            return False
        admitted[connection] = self._unauthenticated.pop(connection)
        return True

    def _role_of(self, request: web.BaseRequest) -> Role | None:
        token = key_of_header(request.headers.get(hdrs.AUTHORIZATION, ""))
        roles = [role for role, known in self._tokens.items() if hmac.compare_digest(token, known)]
        return roles[0] if roles else None

    # Calls

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            role = self._role_of(request)
            if role is None:
                await asyncio.sleep(REFUSAL_DELAY_S)
                return _refusal(RequestRefused("this needs a token of the relay"), 401, is_last=True)
            if hdrs.ORIGIN in request.headers:
                return _refusal(RequestRefused("web pages may not use the relay"), 403, is_last=True)
            if not self._admit(request.protocol, role):
                return _refusal(Unavailable("the relay has too many connections"), is_last=True)
            if role != "writer" and request.method in (hdrs.METH_PUT, hdrs.METH_DELETE):
                raise RequestRefused(
                    "a read key may not change what the relay holds",
                    hint="only the trainer, which has the run's secret, writes and deletes",
                )
            return await self._call(request)
        except RoseError as error:
            return _refusal(error)
        except OSError:  # the client left or stopped moving
            if request.transport is not None:
                request.transport.abort()
            return _refusal(Unavailable("the client stopped"), is_last=True)
        except Exception:
            _log.exception("a relay call ended by an error")
            return _refusal(Unavailable("an error inside the relay"), is_last=True)

    async def _call(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        if path == VALUES_PATH and request.method == hdrs.METH_GET:
            try:
                fields = dict(parse_qsl(query, max_num_fields=8))
            except ValueError as error:
                raise RequestRefused("the query of a listing is `prefix` and `after`") from error
            page = await self._in_thread(self._page, fields.get("prefix", ""), fields.get("after", ""))
            return web.Response(body=msgspec.json.encode(page), content_type="application/json")
        if not path.startswith(f"{VALUES_PATH}/"):
            raise RequestRefused("the relay has no such route")
        key = check_key(path.removeprefix(f"{VALUES_PATH}/"))
        match request.method:
            case hdrs.METH_GET:
                return await self._get(request, key)
            case hdrs.METH_PUT:
                return await self._put(request, key)
            case hdrs.METH_DELETE:
                if not await self._in_thread(self._relay.delete, key):
                    raise KeyMissing(key)
                return web.Response(status=204)
        raise RequestRefused("the relay knows PUT, GET and DELETE")

    async def _get(self, request: web.BaseRequest, key: str) -> web.StreamResponse:
        match = _RANGE.fullmatch(request.headers.get(hdrs.RANGE, ""))
        start, stop = (int(match[1]), int(match[2]) + 1 if match[2] else None) if match else (0, None)
        data = memoryview(await self._in_thread(self._relay.get, key, start, stop))
        if match and not data:
            raise RangeRefused(key, start, stop, start)
        response = web.StreamResponse(status=206 if match else 200)
        response.content_type = "application/octet-stream"
        response.content_length = len(data)
        if match:
            response.headers[hdrs.CONTENT_RANGE] = f"bytes {start}-{start + len(data) - 1}/*"
        await response.prepare(request)
        for at in range(0, len(data), BLOCK_BYTES):
            async with asyncio.timeout(self._silence_s):
                await response.write(data[at : at + BLOCK_BYTES])
        await response.write_eof()
        return response

    async def _put(self, request: web.BaseRequest, key: str) -> web.Response:
        if request.headers.get(hdrs.IF_NONE_MATCH) != "*":
            raise RequestRefused("keys are written once", hint="send the header `If-None-Match: *`")
        if (request.content_length or 0) > relay_api.VALUE_BYTES_MAX:
            raise _too_large(key)
        if await self._in_thread(self._is_taken, key):
            raise KeyExists(key)
        is_large = (request.content_length or 0) > BLOCK_BYTES and self._tls is None
        blocks = self._blocks_of_socket(request) if is_large else self._blocks(request.content, key)
        try:
            size_bytes = await self._in_thread(self._relay.put_new, key, blocks)
            response = web.Response(status=201, body=msgspec.json.encode(relay_api.Stored(size_bytes)))
        except RoseError as error:
            if is_large:
                await self._in_thread(_read_to_end, blocks)  # so that the client sees the refusal, not a reset
            response = _refusal(error)
        finally:
            with contextlib.suppress(ValueError):  # its thread still runs: the server is closing
                blocks.close()
        if is_large:
            request.content.feed_eof()
            response.force_close()
        return response

    def _blocks_of_socket(self, request: web.BaseRequest) -> Generator[Buffer, None, None]:
        """Take the socket of a request from its parser; return its body's blocks, for a worker thread."""
        assert request.content_length is not None
        if request.transport is None:
            raise ConnectionResetError("the client left before its value came")
        begin = request.content.read_nowait()
        request.transport.pause_reading()
        plain = socket.socket(fileno=os.dup(request.transport.get_extra_info("socket").fileno()))
        return self._read_socket(plain, begin, request.content_length - len(begin))

    def _read_socket(self, plain: socket.socket, begin: bytes, left_bytes: int) -> Generator[Buffer, None, None]:
        """Yield `begin` and what follows; each block is valid until the next is asked for."""
        with plain:
            yield begin
            poll = select.poll()
            poll.register(plain, select.POLLIN)
            scratch = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # returned to the system, where an arena would keep it
            while left_bytes:
                block, count = scratch[:left_bytes], 0
                while count < len(block):
                    if not poll.poll(1000 * self._silence_s):
                        raise TimeoutError("the client stopped sending")
                    received = plain.recv_into(block[count:])
                    if not received:
                        raise ConnectionResetError("the client left in the middle of a value")
                    count += received
                left_bytes -= count
                yield block

    def _blocks(self, content: StreamReader, key: str) -> Generator[Buffer, None, None]:
        """Yield the body in a worker thread, about a block at a time."""
        size_bytes = 0
        while parts := asyncio.run_coroutine_threadsafe(self._block(content), self._loop).result():
            size_bytes += sum(len(part) for part in parts)
            if size_bytes > relay_api.VALUE_BYTES_MAX:
                raise _too_large(key)
            yield from parts

    async def _block(self, content: StreamReader) -> list[bytes]:
        """Return the next parts of a body, about a block; raise if it ends early or stalls."""
        parts: list[bytes] = []
        size_bytes = 0
        try:
            while size_bytes < BLOCK_BYTES:
                async with asyncio.timeout(self._silence_s):
                    part = await content.readany()
                if not part:
                    break
                parts.append(part)
                size_bytes += len(part)
        except BaseException:
            parts.clear()  # the error holds this frame until the garbage collector finds their cycle
            raise
        return parts

    def _is_taken(self, key: str) -> bool:
        try:
            self._relay.get(key, 0, 0)
        except KeyMissing:
            return False
        return True

    def _page(self, prefix: str, after: str) -> relay_api.ListingPage:
        """Return the next page of the listing, without names that are no keys: no relay has written them."""
        entries = [entry for entry in self._relay.list(prefix) if is_key(entry.key)]
        first = bisect.bisect_right(entries, after, key=lambda entry: entry.key)
        page = entries[first : first + relay_api.PAGE_ENTRIES_MAX]
        values = [relay_api.ListedValue(entry.key, entry.size_bytes) for entry in page]
        return relay_api.ListingPage(values, first + len(page) == len(entries))

    async def _in_thread(self, call: Callable[..., Result], *arguments: Any) -> Result:
        return await self._loop.run_in_executor(self._threads, call, *arguments)


def _read_to_end(blocks: Iterator[Buffer]) -> None:
    for _ in blocks:
        pass


def _refusal(error: RoseError, status: int | None = None, *, is_last: bool = False) -> web.Response:
    response = web.Response(
        status=status or relay_api.status_of(error),
        body=relay_api.encode_problem(error),
        content_type="application/json",
    )
    if response.status in (503, 507):
        response.headers[hdrs.RETRY_AFTER] = "1"
    if is_last:
        response.force_close()
    return response


def _too_large(key: str) -> RequestRefused:
    return RequestRefused(f"`{key}` would have more than {relay_api.VALUE_BYTES_MAX} bytes")


def _cut(plain: socket.socket) -> None:
    """End a connection; its transport closes the socket."""
    with contextlib.suppress(OSError):
        plain.shutdown(socket.SHUT_RDWR)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        hint = "choose another port or address; port 0 takes a free one"
        raise ConfigError(f"the relay cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error
    listener.setblocking(False)
    return listener
