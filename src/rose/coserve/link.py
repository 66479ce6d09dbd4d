"""The engine's end of the socket: never blocks a step, and bounds what it holds for a front that does not read.

Sending puts a frame in a buffer and writes what the kernel takes. Above `BUFFER_BYTES` the link is congested and the
executor stops stepping, since nobody takes what it makes; a front that then takes nothing for `STALL_S` is given up.
Waiting is one `poll` on the socket and on an event descriptor, by which another thread can end it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence

from rose.coserve.messages import Command, Event, FrameReader, decode_command, frame
from rose.errors import Unavailable

BUFFER_BYTES = 8 << 20  # seconds of tokens; a front that is this far behind does not serve anybody
STALL_S = 60.0  # longer than any pause of a healthy process, short enough that nobody waits for it
RECEIVE_BYTES = 1 << 18


class Closed(Exception):
    """The front is gone."""


class EngineLink:
    """Frames over a non-blocking socket. Only `wake` may be called from another thread."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = FrameReader()
        self._outgoing = bytearray()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def congested(self) -> bool:
        return len(self._outgoing) > BUFFER_BYTES

    def receive(self) -> Iterator[Command]:
        """Commands that have arrived; does not wait. Raises Closed at the end of the stream."""
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise Closed from error
            if not data:
                raise Closed
            for body in self._reader.push(data):
                yield decode_command(body)

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
                return
            except OSError:
                sent = len(self._outgoing)
            del self._outgoing[:sent]

    def wait(self) -> None:
        """Block until a command, `wake`, or, when something is left to send, room for it."""
        wait_any([self])

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self._socket.close()
        os.close(self._wake)

    def drain(self, seconds: float) -> None:
        """Before leaving: give the last words a bounded time to get out."""
        deadline_s = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self._outgoing and (left_s := deadline_s - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self.flush()

    def watch(self, poll: select.poll) -> bool:
        """Enter what this link waits for; whether something is left to send."""
        poll.register(self._wake, select.POLLIN)
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        return bool(self._outgoing)

    def settle(self) -> None:
        """After a wait: the wake-up is used, and there may be room to send."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self.flush()


def wait_any(links: Sequence[EngineLink], seconds: float | None = None, *, also: Sequence[int] = ()) -> None:
    """Block until one of the links has something to do, a descriptor of `also` is readable, or for so long at most."""
    poll = select.poll()
    for descriptor in also:
        poll.register(descriptor, select.POLLIN)
    is_sending = [link.watch(poll) for link in links]
    limit_s = min(seconds if seconds is not None else STALL_S, STALL_S)
    found = poll.poll(limit_s * 1000 if any(is_sending) or seconds is not None else None)
    if not found and seconds is None:
        raise Unavailable(f"the front took nothing for {STALL_S:.0f} s")
    for link in links:
        link.settle()
