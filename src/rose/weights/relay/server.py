"""Our own relay server: a door over TCP to another relay, normally a folder on the server's disk.

One thread per connection, and of every value only one block in memory: what a slow disk has not taken is not read
from the socket, and what a slow reader has not taken is not read from the disk, so the sender feels it. A side that
does not move for `silence_s` is cut off. A writer that is cut off leaves nothing visible.

A reader may list and get; only a writer may put and delete (`wire` describes how a role is proved).

    python -m rose.weights.relay.server FOLDER --secret-file FILE [--listen 127.0.0.1:7070] [--certificate C --key K]
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from pathlib import Path

from rose.errors import ConfigError, RequestRefused, RoseError
from rose.weights.keys import check_secret, write_key
from rose.weights.relay import wire
from rose.weights.relay.base import KeyExists, KeyMissing, Relay, is_key
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.tcp import SILENCE_S, split_address

CONNECTIONS_MAX = 256  # of each role, so that readers never take the places of the trainer
STRANGERS_MAX = 64  # connections that have not proved a role yet
IDLE_S = 300.0  # an authenticated connection without a call is closed after this long; clients open another
ACCEPT_PAUSE_S = 0.1  # after accept failed, for example for lack of file descriptors

_log = logging.getLogger(__name__)


class RelayServer:
    """Listens from construction on; `close` ends it and every connection.

    A connection that has not proved its role lives for `welcome_s` at most, and is closed earlier if `strangers_max`
    younger ones came: a flood of strangers delays an honest client's first milliseconds, and takes no place of those
    that are authenticated.
    """

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
        welcome_s: float = wire.WELCOME_S,
        connections_max: int = CONNECTIONS_MAX,
        strangers_max: int = STRANGERS_MAX,
    ) -> None:
        self._relay = relay
        made = write_key(secret)
        self._keys: dict[wire.Role, bytes] = {"reader": made.read.relay, "writer": made.relay}
        self._tls = tls
        self._silence_s, self._idle_s, self._welcome_s = silence_s, idle_s, welcome_s
        self._connections_max, self._strangers_max = connections_max, strangers_max
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._admitted: dict[wire.Role, set[socket.socket]] = {"reader": set(), "writer": set()}
        self._is_closed = False
        self._lock = threading.Lock()
        self._listener = _listen(host, port)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="relay-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for plain in [*self._strangers, *self._admitted["reader"], *self._admitted["writer"]]:
                _cut(plain)
        self._thread.join()

    def __enter__(self) -> RelayServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Connections

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                plain, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    _log.warning("the relay cannot accept a connection: %s", error)
                    time.sleep(ACCEPT_PAUSE_S)
                continue
            try:
                if self._tls is not None:
                    plain = self._tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
                self._make_room(plain)
                threading.Thread(target=self._attend, args=(plain,), name="relay-connection", daemon=True).start()
            except Exception as error:  # it is gone already, or there is no room for a thread; others may come
                _log.warning("the relay cannot take a connection: %s", error)
                self._forget(plain)

    def _make_room(self, plain: socket.socket) -> None:
        with self._lock:
            while len(self._strangers) >= self._strangers_max:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _cut(oldest)
            self._strangers[plain] = None

    def _attend(self, plain: socket.socket) -> None:
        try:
            self._serve(plain)
        except (wire.Disconnected, OSError):
            pass  # the other side sees the end of its connection, and reports it in its own words
        except Exception:
            _log.exception("a relay connection ended by an error")
        finally:
            self._forget(plain)

    def _forget(self, plain: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(plain, None)
            for admitted in self._admitted.values():
                admitted.discard(plain)
        plain.close()

    def _serve(self, plain: socket.socket) -> None:
        until_s = time.monotonic() + self._welcome_s
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if isinstance(plain, ssl.SSLSocket):
            plain.settimeout(self._welcome_s)
            plain.do_handshake()  # its timeout is for the whole of it
        connection, role = wire.welcome(plain, self._keys, until_s, lambda role: self._admit(plain, role))
        while True:
            plain.settimeout(self._idle_s)
            request = connection.receive_request()
            plain.settimeout(self._silence_s)
            self._answer(connection, request, role)

    def _admit(self, plain: socket.socket, role: wire.Role) -> bool:
        """Move a connection that has proved its role out of the strangers, if there is a place."""
        with self._lock:
            admitted = self._admitted[role]
            if plain not in self._strangers or len(admitted) >= self._connections_max:
                return False
            del self._strangers[plain]
            admitted.add(plain)
            return True

    # Calls

    def _answer(self, connection: wire.Connection, request: wire.Request, role: wire.Role) -> None:
        try:
            if role != "writer" and isinstance(request, wire.Put | wire.Delete):
                raise RequestRefused(
                    "a read key may not change what the relay holds",
                    hint="only the trainer, which has the run's secret, writes and deletes",
                )
            match request:
                case wire.Put():
                    self._put(connection, request.key)
                case wire.Get():
                    data = memoryview(self._relay.get(request.key, request.start, request.stop))
                    connection.send(wire.Done(len(data)))
                    connection.send_bytes(data)
                case wire.List():
                    connection.send(self._page(request))
                case wire.Delete():
                    connection.send(wire.Done(int(self._relay.delete(request.key))))
        except RoseError as error:
            connection.send(wire.refusal_of(error))

    def _put(self, connection: wire.Connection, key: str) -> None:
        """First say whether the value may come, then take it. What is refused midway is read to its end, unkept."""
        if self._is_taken(key):
            raise KeyExists(key)
        connection.send(wire.Done())
        blocks = connection.receive_blocks()
        try:
            size = self._relay.put_new(key, blocks)
        except RoseError:
            for _ in blocks:
                pass
            raise
        connection.send(wire.Done(size))

    def _is_taken(self, key: str) -> bool:
        try:
            self._relay.get(key, 0, 0)
        except KeyMissing:
            return False
        return True

    def _page(self, request: wire.List) -> wire.Page:
        """Return what comes next in the listing, without names that are no keys: no relay has written them."""
        entries = [entry for entry in self._relay.list(request.prefix) if is_key(entry.key)]
        first = bisect.bisect_right(entries, request.after, key=lambda entry: entry.key)
        page = entries[first : first + wire.PAGE_ENTRIES_MAX]
        return wire.Page([(entry.key, entry.size_bytes) for entry in page], first + len(page) == len(entries))


def _cut(plain: socket.socket) -> None:
    """End a connection; its thread closes the socket."""
    with contextlib.suppress(OSError):
        plain.shutdown(socket.SHUT_RDWR)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        hint = "choose another port or address; port 0 takes a free one"
        raise ConfigError(f"the relay cannot listen on {host}:{port}: {error.strerror}", hint=hint) from error


def read_secret(path: Path) -> bytes:
    """The secret in a file, without the newline at its end."""
    try:
        return check_secret(path.read_bytes().strip())
    except OSError as error:
        hint = f"make one with: openssl rand -hex 32 > {path}"
        raise ConfigError(f"the secret in {path} cannot be read: {error.strerror}", hint=hint) from error


def main(arguments: list[str] | None = None) -> int:
    """Serve a folder until told to stop. Prints one line with its address when it listens."""
    parser = argparse.ArgumentParser(prog="rose.weights.relay.server", description="serve a relay folder over TCP")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--secret-file", type=Path, required=True, help="a file with the run's secret")
    parser.add_argument("--listen", default="127.0.0.1:7070", help="address and port; other machines need 0.0.0.0")
    parser.add_argument("--certificate", help="speak TLS with this certificate")
    parser.add_argument("--key", help="the private key of the certificate")
    options = parser.parse_args(arguments)
    try:
        host, port = split_address(options.listen)
        if bool(options.certificate) != bool(options.key):
            raise RequestRefused("TLS needs both --certificate and --key")
        tls = wire.server_tls(options.certificate, options.key) if options.certificate else None
        secret = read_secret(options.secret_file)
        server = RelayServer(FilesystemRelay(options.folder), secret, host=host, port=port, tls=tls)
    except RoseError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with server:
        print(f"relay of {options.folder} listening on {server.address}, process {os.getpid()}", flush=True)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main())
