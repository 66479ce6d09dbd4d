"""Our own relay server: a door over TCP to another relay, normally a folder on the server's disk.

One thread per connection, and of every value only one block in memory: what a slow disk has not taken is not read
from the socket, and what a slow reader has not taken is not read from the disk, so the sender feels it. A side that
does not move for `silence_s` is cut off. A writer that is cut off leaves nothing visible.

    python -m rose.weights.relay.server FOLDER --secret-file FILE [--listen 127.0.0.1:7070] [--certificate C --key K]
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
from pathlib import Path

from rose.errors import ConfigError, RequestRefused, RoseError
from rose.weights.relay import wire
from rose.weights.relay.base import KeyExists, KeyMissing, Relay
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.tcp import SILENCE_S, split_address

WELCOME_S = 5.0  # a stranger holds a connection no longer than this
CONNECTIONS_MAX = 256
PAGE_ENTRIES = 1000  # at most about 600 bytes each, so that a page fits a message


class RelayServer:
    """Listens from construction on; `close` ends it and every connection."""

    def __init__(
        self,
        relay: Relay,
        secret: bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        silence_s: float = SILENCE_S,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._relay = relay
        self._secret = wire.check_secret(secret)
        self._tls = tls
        self._silence_s = silence_s
        self._connections_max = connections_max
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = _listen(host, port)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="relay-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for plain in self._open:
                with contextlib.suppress(OSError):
                    plain.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def __enter__(self) -> RelayServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Connections

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                is_room = len(self._open) < self._connections_max
                if is_room:
                    self._open.add(plain)
            if is_room:
                threading.Thread(target=self._attend, args=(plain,), name="relay-connection", daemon=True).start()
            else:
                plain.close()

    def _attend(self, plain: socket.socket) -> None:
        try:
            plain.settimeout(WELCOME_S)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                plain = self._wrapped(self._tls, plain)
            self._serve(plain)
        except (wire.Disconnected, OSError):
            pass  # the other side is told by the end of its connection, and has its own words for it
        finally:
            with self._lock:
                self._open.discard(plain)
            plain.close()

    def _wrapped(self, tls: ssl.SSLContext, plain: socket.socket) -> ssl.SSLSocket:
        spoken = tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._open.discard(plain)
            self._open.add(spoken)
        return spoken

    def _serve(self, plain: socket.socket) -> None:
        if isinstance(plain, ssl.SSLSocket):
            plain.do_handshake()
        connection = wire.welcome(plain, self._secret)
        while True:
            plain.settimeout(None)  # an idle client may stay; the kernel finds out if it has died
            request = connection.receive_request()
            plain.settimeout(self._silence_s)
            self._answer(connection, request)

    # Calls

    def _answer(self, connection: wire.Connection, request: wire.Request) -> None:
        try:
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
        entries = self._relay.list(request.prefix)
        first = bisect.bisect_right(entries, request.after, key=lambda entry: entry.key)
        page = entries[first : first + PAGE_ENTRIES]
        return wire.Page([(entry.key, entry.size_bytes) for entry in page], first + len(page) == len(entries))


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
        return wire.check_secret(path.read_bytes().strip())
    except OSError as error:
        hint = f"make one with: openssl rand -hex 32 > {path}"
        raise ConfigError(f"the secret in {path} cannot be read: {error.strerror}", hint=hint) from error


def main(arguments: list[str] | None = None) -> int:
    """Serve a folder until told to stop. Prints one line with its address when it listens."""
    parser = argparse.ArgumentParser(prog="rose.weights.relay.server", description="serve a relay folder over TCP")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--secret-file", type=Path, required=True, help="a file that both sides have")
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
