"""The TCP port of a device: taken early, and what keeps us from it said in plain words."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from rose.config.device import FrontSettings
from rose.errors import ConfigError

SEND_BUFFER_BYTES = 256 << 10  # bounds what the kernel holds for a client that does not read
OTHER_DESCRIPTORS = 128  # of a server: its files, its engine, its threads, and libraries


def take_port(settings: FrontSettings) -> socket.socket:
    """A bound socket that does not listen yet; what keeps us from it is said in plain words."""
    tls_context(settings)  # a certificate that cannot be used is said now, not once the model is loaded
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
        raise cannot_listen(settings, error) from error
    return listener


def cannot_listen(settings: FrontSettings, error: OSError) -> ConfigError:
    """What to tell the user when the system refuses the port."""
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
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tls_context(settings: FrontSettings) -> ssl.SSLContext | None:
    """Return how connections are encrypted; None if they are not. Raises ConfigError."""
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


def connections_limit(wanted: int, say: Callable[[str], None]) -> int:
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
