"""The engine process's ends of its sockets: framed transport that never blocks a step, and the rollout listener.

Sending puts a frame in a buffer and writes what the kernel takes. Above `BUFFER_BYTES` the link is congested and the
executor stops stepping, since its front does not read; a front that takes nothing for `STALL_S` is given up. Waiting is
one `poll` on all links and on an event descriptor, by which another thread can end it.

The serving front makes the rollout listener and keeps it, so a restarted engine listens at the same address. The
address is abstract (no file is left behind), and only processes of the same user are accepted.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from rose.api.faults import Fault
from rose.api.frames import FrameReader
from rose.device.engine_messages import Command, EngineFailed, Event, decode_command, frame
from rose.errors import Unavailable

BUFFER_BYTES = 8 << 20  # seconds of tokens; a front that is this far behind does not serve anybody
STALL_S = 60.0  # longer than any pause of a healthy process, short enough that no client waits for it
RECEIVE_BYTES = 1 << 18
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: what SO_PEERCRED gives


class Closed(Exception):
    """The front is gone, or sends what is no command."""


class EngineLink:
    """Frames over a non-blocking socket. Only `wake` may be called from another thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = FrameReader()
        self._arrived: deque[bytes] = deque()  # whole frames that `receive` has not yielded yet
        self._outgoing = bytearray()
        self._stuck_since_s: float | None = None  # the kernel has taken nothing since then
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # another file may have the descriptor's number once it is closed

    @property
    def is_congested(self) -> bool:
        return len(self._outgoing) > BUFFER_BYTES

    @property
    def is_overfull(self) -> bool:
        """Congested, and made to hold as much again: its front goes on sending commands and does not read replies."""
        return len(self._outgoing) > 2 * BUFFER_BYTES

    @property
    def is_stalled(self) -> bool:
        """The front has taken nothing for long. Only a `flush` finds out that it takes something again."""
        return self._stuck_since_s is not None and time.monotonic() - self._stuck_since_s >= STALL_S

    def check(self) -> None:
        """Raise Unavailable if there is no use in waiting for this front any longer."""
        if self.is_stalled:
            raise Unavailable(f"the front took nothing for {STALL_S:.0f} s")

    def receive(self) -> Iterator[Command]:
        """Yield the commands that have arrived, without waiting. Raises Closed at the end of the stream.

        A caller that stops before the end gets the others at the next call.
        """
        while True:
            while self._arrived:
                try:
                    command = decode_command(self._arrived.popleft())
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise Closed from error
                yield command
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise Closed from error
            if not data:
                raise Closed
            try:
                self._arrived.extend(self._reader.push(data))
            except Unavailable as error:  # the length of a frame that no front of ours sends
                raise Closed from error

    def send(self, event: Event) -> None:
        """Put an event on its way; a front that is gone is noticed by `receive`."""
        self._outgoing += frame(event)
        self.flush()

    def flush(self) -> None:
        """Write what the kernel takes now."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing)
            except BlockingIOError:
                self._stuck_since_s = self._stuck_since_s or time.monotonic()
                return
            except OSError:
                sent = len(self._outgoing)
            del self._outgoing[:sent]
            self._stuck_since_s = None

    def wait(self) -> None:
        """Block until a command, `wake`, or room to send; raise Unavailable when there was no room for too long."""
        wait_any([self])
        self.check()

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._socket.close()
        with self._wake_lock:
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def drain(self, seconds: float) -> None:
        """Give what is left to send a bounded time to get out, before the process exits."""
        deadline_s = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._outgoing and (left_s := deadline_s - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self.flush()

    def register(self, poll: select.poll) -> float:
        """Enter what this link waits for, and return for how long it waits at most."""
        poll.register(self._wake, select.POLLIN)
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if self._arrived:
            return 0.0
        return STALL_S if self._outgoing else math.inf

    def after_wait(self) -> None:
        """Use up the wake-up, and send what there is room for now."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self.flush()


def wait_any(links: Sequence[EngineLink], seconds: float = math.inf, *, also: Sequence[int] = ()) -> None:
    """Block until a link has something to do, a descriptor of `also` is readable, or for `seconds`."""
    poll = select.poll()
    for descriptor in also:
        poll.register(descriptor, select.POLLIN)
    limit_s = min([seconds, *(link.register(poll) for link in links)])
    poll.poll(limit_s * 1000 if limit_s < math.inf else None)
    for link in links:
        link.after_wait()


# The rollout listener


def open_rollout_listener() -> socket.socket:
    """Return a listening socket at an address of the kernel's choice."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
    listener.listen(4)
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address as it is written on a command line: the name without its leading zero byte."""
    name: bytes = listener.getsockname()
    return name[1:].decode()


def reject_connections(listener: socket.socket, why: str) -> None:
    """Answer every waiting connection with the reason, and close it; the listener does not block."""
    answer = frame(EngineFailed(Fault("Unavailable", why)))
    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
        while True:
            with listener.accept()[0] as connection, contextlib.suppress(OSError):
                connection.sendall(answer)  # fits into the buffer of a new connection


class RolloutListener:
    """The engine's side of the listening socket. The loop accepts one rollout front at a time."""

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> EngineLink | None:
        """Return a link to the next front, if one waits; processes of other users are rejected."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return None
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            _, uid, _ = CREDENTIALS.unpack(credentials)
            if uid == os.getuid():
                return EngineLink(connection)
            connection.close()
