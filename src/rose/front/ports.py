"""The TCP port of a device: taken early, and what keeps us from it said in plain words."""

from __future__ import annotations

import errno
import socket

from rose.config.device import FrontSettings
from rose.errors import ConfigError

SEND_BUFFER_BYTES = 256 << 10  # bounds what the kernel holds for a client that does not read


def take_port(settings: FrontSettings) -> socket.socket:
    """A bound socket that does not listen yet; what keeps us from it is said in plain words."""
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
