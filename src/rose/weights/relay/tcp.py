"""The client of our own relay server: for two clusters that share no storage.

Every call takes an idle connection, or opens one, so that threads go on side by side; a connection that failed is
thrown away. A read that is cut off goes on where it stopped, on a new connection, since values never change. A write
that is cut off has not happened, or has and its answer was lost: the caller sees `Unavailable` and decides.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from rose.errors import ConfigError, Unavailable
from rose.weights.keys import is_read_key, read_key, write_key
from rose.weights.relay import wire
from rose.weights.relay.base import Buffer, Chunks, Entry, check_key, check_prefix

CONNECT_S = 5.0
SILENCE_S = 30.0  # a side that neither sends nor takes a byte for this long is gone
RESUMES_MAX = 4  # in a row without a single new byte
IDLE_CONNECTIONS_MAX = 8
VALUE_BYTES_MAX = 4 << 30  # far beyond a bucket, the largest value
ENTRIES_MAX = 1 << 20  # of one listing; a run holds some thousands


class TcpRelay:
    """Speaks to `rose.weights.relay.server` at `address` ("host:port"): with a read key as reader, else as writer."""

    def __init__(
        self, address: str, secret: bytes, *, tls: ssl.SSLContext | None = None, silence_s: float = SILENCE_S
    ) -> None:
        self._host, self._port = split_address(address)
        self._role, self._key = _role_of(secret)
        self._tls = tls
        self._silence_s = silence_s
        self._idle: list[wire.Connection] = []
        self._lock = threading.Lock()

    def put_new(self, key: str, chunks: Chunks) -> int:
        check_key(key)
        with self._connection() as connection:
            self._ask(connection, wire.Put(key), key)
            connection.send_blocks(chunks)
            return self._done(connection, key)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        check_key(key)
        data: memoryview | None = None
        received = fruitless = 0
        while True:
            before = received
            try:
                with self._connection() as connection:
                    size = self._ask(connection, wire.Get(key, start + received, stop), key)
                    if size > VALUE_BYTES_MAX or (stop is not None and size != stop - start - received):
                        raise wire.Disconnected(f"{size} bytes were announced for `{key}`")
                    if data is None:
                        data = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
                    if size != len(data) - received:
                        raise wire.Disconnected(f"`{key}` changed while it was read")
                    while received < len(data):
                        received += connection.read_some(data[received:])
                    return data
            except Unavailable:
                fruitless = 0 if received > before else fruitless + 1
                if not received or fruitless > RESUMES_MAX:
                    raise

    def list(self, prefix: str = "") -> Sequence[Entry]:
        prefix = check_prefix(prefix)
        found: list[Entry] = []
        with self._connection() as connection:
            while True:
                connection.send(wire.List(prefix, found[-1].key if found else ""))
                page = connection.receive_answer()
                if isinstance(page, wire.Refusal):
                    raise _Refused(page, prefix)
                if not isinstance(page, wire.Page):
                    raise wire.Disconnected("a page of the listing was expected")
                found += _entries_after(found[-1].key if found else "", page)
                if page.is_last:
                    return found
                if not page.entries or len(found) > ENTRIES_MAX:
                    raise wire.Disconnected("the listing has no end")

    def delete(self, key: str) -> bool:
        check_key(key)
        with self._connection() as connection:
            return bool(self._ask(connection, wire.Delete(key), key))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # Talking

    def _ask(self, connection: wire.Connection, request: wire.Request, key: str) -> int:
        connection.send(request)
        return self._done(connection, key)

    def _done(self, connection: wire.Connection, key: str) -> int:
        answer = connection.receive_answer()
        if isinstance(answer, wire.Refusal):
            raise _Refused(answer, key)
        if not isinstance(answer, wire.Done):
            raise wire.Disconnected("an answer to the call was expected")
        return answer.number

    @contextlib.contextmanager
    def _connection(self) -> Iterator[wire.Connection]:
        """A connection for one call. A refusal leaves it usable; anything else that goes wrong does not."""
        connection = self._take()
        try:
            yield connection
        except _Refused as refused:
            self._give_back(connection)
            raise wire.error_of(refused.refusal, refused.key) from None
        except wire.Disconnected as error:
            connection.close()
            raise self._unavailable(str(error)) from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)

    def _take(self) -> wire.Connection:
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection = self._idle.pop()
            if not connection.is_stale():
                return connection
            connection.close()
        return self._connect()

    def _give_back(self, connection: wire.Connection) -> None:
        with self._lock:
            if len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> wire.Connection:
        try:
            plain = socket.create_connection((self._host, self._port), timeout=CONNECT_S)
        except OSError as error:
            raise self._unavailable(f"no connection: {error}") from error
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                plain = self._tls.wrap_socket(plain, server_hostname=self._host)
            connection = wire.greet(plain, self._role, self._key)
            plain.settimeout(self._silence_s)
            return connection
        except ssl.SSLCertVerificationError as error:
            plain.close()
            hint = "give the certificate that signed the server's, or connect by the name it was made for"
            raise ConfigError(
                f"the relay at {self.address} is not trusted: {error.verify_message}", hint=hint
            ) from error
        except wire.Stranger as error:
            plain.close()
            hint = "give the relay and the trainer the same secret, workers its read key, and check the address"
            raise ConfigError(f"the relay at {self.address}: {error}", hint=hint) from error
        except (OSError, wire.Disconnected) as error:
            plain.close()
            hint = "check that both sides use TLS or neither, and run the same version of ROSE; it is tried again"
            raise self._unavailable(f"no welcome: {error}", hint) from error

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def _unavailable(self, why: str, hint: str | None = None) -> Unavailable:
        return Unavailable(f"the relay at {self.address} failed: {why}", hint=hint)


class _Refused(Exception):
    """The server refused the call; the connection is as good as before."""

    def __init__(self, refusal: wire.Refusal, key: str) -> None:
        self.refusal = refusal
        self.key = key


def _role_of(secret: bytes) -> tuple[wire.Role, bytes]:
    if is_read_key(secret):
        return "reader", read_key(secret).relay
    return "writer", write_key(secret).relay


def _entries_after(last: str, page: wire.Page) -> list[Entry]:
    """Return the entries of a page; raise Disconnected unless their keys go up from the last one before it."""
    keys = [last, *(key for key, _ in page.entries)]
    if any(key >= later for key, later in itertools.pairwise(keys)):
        raise wire.Disconnected("the listing is not in order")
    return [Entry(key, size) for key, size in page.entries]


def split_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"`{address}` is not an address", hint="write it like 127.0.0.1:7070")
    return host.strip("[]"), int(port)
