"""The engine's end of the socket: never blocks a step, and bounds what it holds for a front that does not read.

Sending puts a frame in a buffer and writes what the kernel takes. Above `BUFFER_BYTES` the link is congested and the
executor stops stepping, since nobody takes what it makes; a front that takes nothing for `STALL_S` is given up.
Waiting is one `poll` on the socket and on an event descriptor, by which another thread can end it. Whoever has several
links waits for all of them, and judges each by itself: a front that is stuck is no reason to give up another.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from rose.coserve.messages import Command, Event, FrameReader, decode_command, frame
from rose.errors import Unavailable

BUFFER_BYTES = 8 << 20  # seconds of tokens; a front that is this far behind does not serve anybody
STALL_S = 60.0  # longer than any pause of a healthy process, short enough that nobody waits for it
RECEIVE_BYTES = 1 << 18


class Closed(Exception):
    """The front is gone, or sends what is no command."""


class EngineLink:
    """Frames over a non-blocking socket. Only `wake` may be called from another thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = FrameReader()
        self._arrived: deque[bytes] = deque()  # whole frames nobody has asked for yet
        self._outgoing = bytearray()
        self._stuck_since_s: float | None = None  # the kernel has taken nothing since then
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # another file may have the descriptor's number once it is closed

    @property
    def congested(self) -> bool:
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
        """Raises Unavailable if there is no use in waiting for this front any longer."""
        if self.is_stalled:
            raise Unavailable(f"the front took nothing for {STALL_S:.0f} s")

    def receive(self) -> Iterator[Command]:
        """Commands that have arrived; does not wait. Raises Closed at the end of the stream.

        Whoever stops before the end finds the others at the next call.
        """
        while True:
            while self._arrived:
                yield self._next()
            if not self._read():
                return

    def _next(self) -> Command:
        try:
            return decode_command(self._arrived.popleft())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Closed from error

    def _read(self) -> bool:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise Closed from error
        if not data:
            raise Closed
        try:
            self._arrived.extend(self._reader.push(data))
        except Unavailable as error:  # the length of a frame that no front of ours sends
            raise Closed from error
        return True

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
        """Block until a command, `wake`, or, when something is left to send, room for it.

        Raises Unavailable when there has been none for too long.
        """
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
        """Before leaving: give the last words a bounded time to get out."""
        deadline_s = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._outgoing and (left_s := deadline_s - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self.flush()

    def watch(self, poll: select.poll) -> float:
        """Enter what this link waits for; for how long at most."""
        poll.register(self._wake, select.POLLIN)
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if self._arrived:
            return 0.0
        return STALL_S if self._outgoing else math.inf

    def settle(self) -> None:
        """After a wait: the wake-up is used, and there may be room to send."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self.flush()


def wait_any(links: Sequence[EngineLink], seconds: float = math.inf, *, also: Sequence[int] = ()) -> None:
    """Block until one of the links has something to do, a descriptor of `also` is readable, or for so long at most."""
    poll = select.poll()
    for descriptor in also:
        poll.register(descriptor, select.POLLIN)
    limit_s = min([seconds, *(link.watch(poll) for link in links)])
    poll.poll(limit_s * 1000 if limit_s < math.inf else None)
    for link in links:
        link.settle()
