"""The client of a relay server: for two clusters that share no storage.

Calls block and may come from several threads: each takes an idle connection or opens one. `http.client` reads straight
into the caller's memory, which no asynchronous client does, and needs no event loop in the training process.

A read that is cut off goes on where it stopped, on a new connection, since values never change. A write that is cut
off has not happened, or has and its response was lost: the caller sees `Unavailable` and may begin again.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TypeVar

import numpy as np

from rose.bounds import UNREADABLE
from rose.errors import ConfigError, RoseError, Unavailable
from rose.weights.relay import relay_api
from rose.weights.relay.relay_api import BLOCK_BYTES, SILENCE_S, VALUES_PATH
from rose.weights.relay.relay_base import (
    Buffer,
    Buffers,
    KeyMissing,
    RangeRefused,
    RelayEntry,
    check_key,
    check_prefix,
    check_range,
)

CONNECT_S = 5.0  # for the TLS handshake too
RESUMES_MAX = 4  # in a row without a single new byte
IDLE_CONNECTIONS_MAX = 8
ENTRIES_MAX = 1 << 20  # of one listing; a run holds some thousands

Kind = TypeVar("Kind")


class _Disconnected(Exception):
    """The connection ended or cannot be trusted any more."""


class HttpRelay:
    """A relay server at `address` ("host:port"): a read key makes this client a reader, the secret a writer."""

    def __init__(
        self, address: str, secret: bytes, *, tls: ssl.SSLContext | None = None, silence_s: float = SILENCE_S
    ) -> None:
        self._host, self._port = relay_api.split_address(address)
        self._role, token = relay_api.role_token(secret)
        self._headers = {"Authorization": f"Bearer {token}"}
        self._tls = tls
        self._silence_s = silence_s
        self._idle: list[HTTPConnection] = []
        self._lock = threading.Lock()

    def put_new(self, key: str, buffers: Buffers) -> int:
        path = f"{VALUES_PATH}/{check_key(key)}"
        headers = {"If-None-Match": "*"}
        if isinstance(buffers, Sequence):
            headers["Content-Length"] = str(sum(memoryview(buffer).nbytes for buffer in buffers))
        else:
            headers["Transfer-Encoding"] = "chunked"
        with self._call("PUT", path, key, headers, buffers) as response:
            return _decode(response, relay_api.Stored).size_bytes

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        check_key(key)
        if start < 0 or (stop is not None and stop <= start):
            check_range(key, start, stop, self._size_bytes(key))
            return b""
        data: memoryview | None = None
        received = fruitless = 0
        while True:
            before = received
            try:
                headers = {"Range": f"bytes={start + received}-{'' if stop is None else stop - 1}"}
                is_whole = start + received == 0 and stop is None
                with self._call("GET", f"{VALUES_PATH}/{key}", key, {} if is_whole else headers) as response:
                    size = response.length
                    if size is None or size > relay_api.VALUE_BYTES_MAX:
                        raise _Disconnected(f"{size} bytes were announced for `{key}`")
                    if stop is not None and size != stop - start - received:
                        raise _Disconnected(f"{size} bytes were announced for a range of `{key}`")
                    if data is None:
                        data = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
                    if size != len(data) - received:
                        raise _Disconnected(f"`{key}` changed while it was read")
                    while received < len(data):
                        count = response.readinto(data[received : received + BLOCK_BYTES])
                        if not count:
                            raise _Disconnected("the server closed the connection")
                        received += count
                    return data
            except RangeRefused as refused:
                if stop is None and refused.size_bytes == start:
                    return b""
                raise RangeRefused(key, start, stop, refused.size_bytes) from None
            except Unavailable:
                fruitless = 0 if received > before else fruitless + 1
                if not received or fruitless > RESUMES_MAX:
                    raise

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        prefix = check_prefix(prefix)
        entries: list[RelayEntry] = []
        last = ""
        while True:
            with self._call("GET", f"{VALUES_PATH}?prefix={prefix}&after={last}", prefix) as response:
                page = _decode(response, relay_api.ListingPage)
                keys = [last, *(value.key for value in page.values)]
                if any(key >= later for key, later in itertools.pairwise(keys)):
                    raise _Disconnected("the listing is not in order")
                entries += [RelayEntry(value.key, value.size_bytes) for value in page.values]
                if not page.is_last and (not page.values or len(entries) > ENTRIES_MAX):
                    raise _Disconnected("the listing has no end")
            if page.is_last:
                return entries
            last = entries[-1].key

    def delete(self, key: str) -> bool:
        try:
            with self._call("DELETE", f"{VALUES_PATH}/{check_key(key)}", key):
                return True
        except KeyMissing:
            return False

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    # Talking

    @contextlib.contextmanager
    def _call(
        self,
        method: str,
        target: str,
        key: str,
        headers: Mapping[str, str] | None = None,
        buffers: Buffers | None = None,
    ) -> Iterator[HTTPResponse]:
        """Give the response to one request, or raise what the server refused. A connection is kept if all went well."""
        connection = self._take()
        is_whole = False
        try:
            with _translated():
                connection.putrequest(method, target, skip_accept_encoding=True)
                for name, text in {**self._headers, **(headers or {})}.items():
                    connection.putheader(name, text)
                connection.endheaders()
            is_sent = buffers is None or _send_body(connection, buffers)
            with _translated():
                response = connection.getresponse()
                if response.status >= 300:
                    raise self._refusal(response, key)
                yield response
            is_whole = is_sent and response.isclosed()
        except _Disconnected as error:
            raise Unavailable(f"the relay at {self.address} failed: {error}") from error
        finally:
            with self._lock:
                is_kept = is_whole and connection.sock is not None and len(self._idle) < IDLE_CONNECTIONS_MAX
                if is_kept:
                    self._idle.append(connection)
            if not is_kept:
                connection.close()

    def _size_bytes(self, key: str) -> int:
        """Ask for a range that no value has: the refusal says how long the value is."""
        try:
            headers = {"Range": f"bytes={relay_api.VALUE_BYTES_MAX + 1}-"}
            with self._call("GET", f"{VALUES_PATH}/{key}", key, headers):
                raise _Disconnected(f"`{key}` is longer than a value may be")
        except RangeRefused as refused:
            return refused.size_bytes

    def _take(self) -> HTTPConnection:
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            if not _is_readable(connection):  # between two calls the server sends nothing but the end
                return connection
            connection.close()
        return self._connect()

    def _connect(self) -> HTTPConnection:
        if self._tls is None:
            connection = HTTPConnection(self._host, self._port, timeout=CONNECT_S, blocksize=BLOCK_BYTES)
        else:
            connection = HTTPSConnection(
                self._host, self._port, timeout=CONNECT_S, blocksize=BLOCK_BYTES, context=self._tls
            )
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            what = f"the relay at {self.address} is not trusted: {error.verify_message}"
            hint = "give the certificate that signed the server's, or connect by the name it was made for"
            raise ConfigError(what, hint=hint) from error
        except OSError as error:
            hint = "check the address, and that both sides use TLS or neither; it is tried again"
            raise Unavailable(f"the relay at {self.address} failed: no connection: {error}", hint=hint) from error
        connection.sock.settimeout(self._silence_s)
        return connection

    def _refusal(self, response: HTTPResponse, key: str) -> RoseError:
        if response.status == 401:
            hint = "give the relay and the trainer the same secret, workers its read key, and check the address"
            return ConfigError(f"the relay at {self.address} refused the token of this {self._role}", hint=hint)
        problem = _decode(response, relay_api.RelayProblemBody).error
        return relay_api.error_of(problem, key)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Wrap what touches the socket, and only that: an error of the caller's buffers is not ours to translate."""
    try:
        yield
    except (OSError, HTTPException) as error:
        raise _Disconnected(str(error) or type(error).__name__) from error


def _send_body(connection: HTTPConnection, buffers: Buffers) -> bool:
    """Send a body, framed if its length is not known; return False if the server responded before its end."""
    is_framed = not isinstance(buffers, Sequence)
    is_watched = not isinstance(connection.sock, ssl.SSLSocket)  # TLS sends session tickets, which are no response
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for at in range(0, len(view), BLOCK_BYTES):
            block = view[at : at + BLOCK_BYTES]
            with _translated():
                if is_watched and _is_readable(connection):
                    return False
                if is_framed:
                    connection.send(b"%X\r\n" % len(block))
                connection.send(block)
                if is_framed:
                    connection.send(b"\r\n")
    if is_framed:
        with _translated():
            connection.send(b"0\r\n\r\n")
    return True


def _is_readable(connection: HTTPConnection) -> bool:
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _decode(response: HTTPResponse, kind: type[Kind]) -> Kind:
    body = response.read(relay_api.MESSAGE_BYTES_MAX + 1)
    try:
        return relay_api.decode_body(body, kind)
    except UNREADABLE as error:
        raise _Disconnected(f"an unexpected response with status {response.status}: {error}") from error
