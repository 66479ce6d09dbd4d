"""Where the rollouts' front comes in: a Unix socket that the engine process listens on, one guest at a time.

The front that started the device makes the socket and keeps it, so an engine that is restarted listens at the same
address, and a rollout front that died is replaced without the engine noticing more than an empty seat. The address
is abstract (no file is left behind), and only processes of the same user are let in.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from rose.coserve import messages
from rose.coserve.link import EngineLink

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: what SO_PEERCRED gives


def open_door() -> socket.socket:
    """A listening socket at an address of the kernel's choice."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
    listener.listen(4)
    return listener


def address_of(listener: socket.socket) -> str:
    """How the address is written on a command line: the name without its leading zero byte."""
    name: bytes = listener.getsockname()
    return name[1:].decode()


def turn_away(listener: socket.socket, why: str) -> None:
    """Whoever waits at a door behind which there is no seat; the listener does not block."""
    said = messages.frame(messages.Failed(messages.Fault("Unavailable", why)))
    with suppress(BlockingIOError, ConnectionAbortedError):
        while True:
            with listener.accept()[0] as guest, suppress(OSError):
                guest.sendall(said)  # fits into the buffer of a new connection


class Door:
    """The engine's side of the listening socket."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> EngineLink | None:
        """The next guest, if one waits; strangers are turned away."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            if _uid_of(connection) == os.getuid():
                return EngineLink(connection)
            connection.close()


def _uid_of(connection: socket.socket) -> int:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    uid: int = CREDENTIALS.unpack(found)[1]
    return uid
