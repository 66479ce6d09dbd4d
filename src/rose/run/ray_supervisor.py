"""The actor that supervises one process of a run on a node of a Ray cluster, by the same code as on one machine.

Ray makes one for every command, and makes it again on another node when its node is lost. Such a *life* begins empty:
the driver sees a new public key, sends models and sealed secrets again, and says `begin`. The process is ready, dies,
is started again and writes lines as on one machine (`rose.run.processes`); the driver fetches what happened by `news`.

Ray leaves an actor running when its raylet is killed, beside the copy that it starts elsewhere. So the kernel ends this
process together with its raylet, which is its parent, and the supervised process together with this one. What a life
writes to its node is in a folder of its own, which is locked while it lives; the next life on the node removes those of
dead ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rose.device.os_process import die_with_parent
from rose.device.supervision import supervise
from rose.errors import RoseError, Unavailable
from rose.openai.http_server import free_port
from rose.private_files import FILE_MODE
from rose.run.monitor import ProcessorTime
from rose.run.processes import Command, Processes
from rose.run.ray_placement import on_node, port_of
from rose.run.sealed_secrets import SecretReceiver

PREFIX = "rose-ray-"
LINES_BYTES_MAX = 16 << 20  # lines that the driver has not fetched; the oldest are dropped
NEWS_S = 1.0  # longest that the driver waits for news, and the age of the processor time that it knows
Event = tuple[int, str, Any]


@dataclass(frozen=True, slots=True)
class Hello:
    """A life of a supervisor: its number, its node's address, and the public key for its secrets."""

    life: str
    address: str
    public: bytes


class EventBuffer:
    """Numbered events until they are fetched. Of lines only the newest megabytes are kept, of other events all."""

    def __init__(self) -> None:
        self.has_news = asyncio.Event()
        self._number, self._bytes = 0, 0
        self._lines: deque[Event] = deque()
        self._facts: deque[Event] = deque()

    def add(self, kind: str, what: Any) -> None:
        self._number += 1
        if isinstance(what, bytes):
            self._lines.append((self._number, kind, what))
            self._bytes += len(what)
            while self._bytes > LINES_BYTES_MAX:
                self._bytes -= len(self._lines.popleft()[2])
        else:
            self._facts.append((self._number, kind, what))
        self.has_news.set()

    def since(self, seen: int) -> list[Event]:
        """Return the events after this number, and forget those up to it."""
        while self._lines and self._lines[0][0] <= seen:
            self._bytes -= len(self._lines.popleft()[2])
        while self._facts and self._facts[0][0] <= seen:
            self._facts.popleft()
        self.has_news.clear()
        return sorted([*self._lines, *self._facts], key=lambda event: event[0])


class NodeSupervisor:
    """Supervisor of one process. Its constructor has no argument that can get lost, so Ray can always make it again."""

    def __init__(self, address: str | None = None) -> None:
        """Supervise for Ray, as a child of its raylet; with an address, without Ray."""
        if address is None:
            import ray

            die_with_parent(os.getppid())
            address = ray.util.get_node_ip_address()
        self._address = address
        self._receiver, self._life = SecretReceiver(), secrets.token_hex(8)
        self._folder, self._lock = make_folder(Path(tempfile.gettempdir()))
        self._processor_time = ProcessorTime()
        self._events: EventBuffer | None = None
        self._processes: Processes | None = None
        self._starting: asyncio.Task[None] | None = None

    async def hello(self) -> Hello:
        """Return what the driver must know of this life."""
        return Hello(self._life, self._address, self._receiver.public)

    async def receive(self, name: str, offset: int, content: bytes) -> None:
        """Write a part of a file below the folder of this life; the same part may come twice."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE), "wb") as file:
            file.seek(offset)
            file.write(content)

    async def begin(self, command: Command, sealed: bytes, folders: dict[str, str]) -> None:
        """Start the process; a second call does nothing."""
        if self._processes is not None:
            return
        self._events = events = EventBuffer()
        self._processes = Processes(
            self._folder / "logs",
            self._receiver.unseal(sealed),
            lambda died: events.add("died", died),
            lambda line: events.add("line", line),
        )
        self._processes.failed.add_done_callback(lambda done: events.add("failed", done.result().what))
        given = port_of(command)
        port = free_port(self._address) if given and not is_free(self._address, given) else None
        command = on_node(command, self._address, self._folder, folders, port)
        own = os.sched_getaffinity(0)
        command = replace(command, cores=tuple(core for core in command.cores if core in own))
        self._starting = supervise(self._start(command, events), f"the start of {command.role}", print)

    async def news(self, seen: int) -> tuple[list[Event], dict[str, float]]:
        """Return the events after this number, after a moment if there are none, and the processor time by role."""
        events, processes = self._events, self._processes
        if events is None or processes is None:
            raise Unavailable("this supervisor has no process yet")
        if not (found := events.since(seen)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await events.has_news.wait()
            found = events.since(seen)
        return found, self._processor_time.observe(processes.process_ids())

    async def stop(self, seen: int) -> list[Event]:
        """Stop the process, and return the last events."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._processes is not None:
            await self._processes.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._events.since(seen) if self._events is not None else []

    async def _start(self, command: Command, events: EventBuffer) -> None:
        assert self._processes is not None
        await self._processes.prepare()
        try:
            running = await self._processes.start(command, lambda line: events.add("json", line))
        except (RoseError, OSError) as error:
            events.add("failed", error.what if isinstance(error, RoseError) else f"{command.role}: {error}")
            return
        events.add("ready", dict(running.captured))


def make_folder(parent: Path) -> tuple[Path, int]:
    """Return a new private folder and the lock that is held on it. Folders of processes that are gone are removed."""
    for old in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = _lock(old)
            shutil.rmtree(old, ignore_errors=True)
            os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(OSError):
            lock = _lock(folder)
            if folder.exists():  # else another process took it for one that is gone, before it was locked
                return folder, lock


def is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier life take no port
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def _lock(folder: Path) -> int:
    """Return a handle of the folder, locked. Raises OSError if a process holds the lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
