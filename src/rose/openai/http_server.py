"""One HTTP server of a process: its port, its application on that port, and its end.

The port is bound before a model is loaded, so that the operator learns at once that it is in use or that a certificate
cannot be read. A first signal stops listening and gives running requests `shutdown_s` to end; then, or at a second
signal, they are ended with an error.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from aiohttp import web

from rose.config.server_settings import FrontSettings
from rose.errors import ConfigError
from rose.openai.connections import ConnectionTable, HttpConnection

BACKLOG = 1024
KEEP_ALIVE_S = 75.0
HANDLER_SHUTDOWN_S = 1.0  # for handlers to answer that the server is shutting down
HANDSHAKE_S = 10.0  # for TLS
SEND_BUFFER_BYTES = 256 << 10  # bounds what the kernel holds for a client that does not read
OTHER_DESCRIPTORS = 128  # of a server: its files, its engine, its threads, and libraries

Say = Callable[[str], None]


def take_port(settings: FrontSettings) -> socket.socket:
    """Return a bound socket that does not listen yet. Raise ConfigError."""
    tls_context(settings)  # a certificate that cannot be used is an error now, not once the model is loaded
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"`{settings.host}` is not an address", hint="for example --host 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _listen_error(settings, error) from error
    return listener


def _listen_error(settings: FrontSettings, error: OSError) -> ConfigError:
    """Return the error for a port that the system refuses."""
    match error.errno:
        case errno.EADDRINUSE:
            what = f"port {settings.port} on {settings.host} is in use"
            return ConfigError(what, hint="stop what uses it, or choose another: --port 0 takes a free one")
        case errno.EACCES:
            what = f"port {settings.port} needs more rights than this user has"
            return ConfigError(what, hint="choose a port above 1023")
        case errno.EADDRNOTAVAIL:
            what = f"{settings.host} is not an address of this machine"
            return ConfigError(what, hint="--host 127.0.0.1 for this machine only, --host 0.0.0.0 for all")
    return ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tls_context(settings: FrontSettings) -> ssl.SSLContext | None:
    """Return how connections are encrypted; None if they are not. Raise ConfigError."""
    if settings.ssl_certfile is None:
        if settings.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile is set without ssl_certfile", hint="set both, or neither")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        what = f"the certificate {settings.ssl_certfile} or its key cannot be used: {error.strerror or error}"
        raise ConfigError(what, hint="both are PEM files that this user can read") from error
    return context


def connections_limit(wanted: int, say: Say) -> int:
    """Return how many connections can be open at once: as many as wanted, or as the system's limit on files allows.

    The soft limit of this process is raised to the hard one first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # some systems name a hard limit that they do not grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    possible = wanted if soft == resource.RLIM_INFINITY else max(1, soft - OTHER_DESCRIPTORS)
    if possible < wanted:
        say(
            f"at most {possible} connections, not {wanted}: this process may open {soft} files "
            f"(raise `ulimit -n`, or lower max_connections)"
        )
    return min(wanted, possible)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of an address of this machine that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class InFlight:
    """The number of requests that run, and whether new ones are refused."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False


class HttpServer:
    """An application on a socket: aiohttp's runner with our connections."""

    def __init__(self, application: web.Application, settings: FrontSettings, logger_name: str, most: int) -> None:
        # aiohttp reports faults of clients with a traceback; our own faults are reported by the application.
        quiet_logger = logging.getLogger(logger_name)
        quiet_logger.setLevel(logging.CRITICAL)
        self._options: dict[str, Any] = {
            "access_log": None,
            "logger": quiet_logger,
            "keepalive_timeout": KEEP_ALIVE_S,
            "auto_decompress": False,  # request_parsing.py does it, within limits
        }
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,  # a client that leaves is noticed, and its request cancelled
            shutdown_timeout=HANDLER_SHUTDOWN_S,
            **self._options,
        )
        self._settings = settings
        self._table = ConnectionTable(most, settings.read_timeout_s, settings.slow_reader_s)
        self._server: asyncio.Server | None = None

    async def listen(self, listener: socket.socket) -> None:
        """Start to accept connections. Raise ConfigError."""
        tls = tls_context(self._settings)
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connection,
                sock=listener,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
            )
        except OSError as error:
            raise _listen_error(self._settings, error) from error

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        self.stop_listening()
        await self._runner.cleanup()

    def _connection(self) -> HttpConnection:
        assert self._runner.server is not None
        return HttpConnection(self._table, self._runner.server, self._options)


class Signals:
    """SIGINT and SIGTERM of this process, the first and the second."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    async def interrupts(self, work: Coroutine[None, None, None]) -> None:
        """Do this work, unless a signal comes first; then raise KeyboardInterrupt."""
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, self.first], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise KeyboardInterrupt
        await task

    def _on_signal(self) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(None)
                return


async def drain(in_flight: InFlight, limit_s: float, signals: Signals, say: Say) -> None:
    """Refuse new requests and wait, up to a limit, for running ones to end."""
    in_flight.draining = True
    if in_flight.count:
        say(f"stopping: {in_flight.count} requests have {limit_s:g} s to end; stop again to end them now")
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + limit_s
    while in_flight.count and not signals.second.done() and loop.time() < deadline_s:
        await asyncio.wait([signals.second], timeout=0.05)
