"""Real processes on a KV pool, for tests: each does what it is told over a socket, and can be killed at any call.

`Nursery` is one process that forks the others: a fork takes a millisecond, where a new interpreter takes a third of a
second. What a process has mapped is read from /proc, so the kernel is the judge and not the code under test.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from rose.device.kv_pool.exchange import create_pool, join_pool
from rose.device.kv_pool.pool_share import PoolShare
from rose.errors import RoseError

ROOT = Path(__file__).parents[2]
ANSWER_TIMEOUT_S = 60.0
MAPPED_PAGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-s ([0-9a-f]+) \S+ \d+ +/memfd:rose-kv")


class Died(Exception):
    """The process ended instead of answering."""


class Nursery:
    """The parent of pool processes."""

    def __init__(self, **environment: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.support.pool_processes"]
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        variables = os.environ | {"PYTHONPATH": paths} | environment
        self._process = subprocess.Popen(command, cwd=ROOT, env=variables, stdin=theirs)
        theirs.close()
        self._socket = ours

    def start(self) -> PoolProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"start"], [theirs.fileno()])
        ours.settimeout(ANSWER_TIMEOUT_S)
        return PoolProcess(int(self._socket.recv(32)), ours)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(ANSWER_TIMEOUT_S)


class PoolProcess:
    """One process: `call` waits for its answer, `begin` and `answer` do not wait in between."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._lines = connection.makefile("rw", encoding="utf-8")
        self._connection = connection
        self.is_alive = True

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.answer()

    def begin(self, name: str, *arguments: Any) -> None:
        self._lines.write(json.dumps([name, *arguments]) + "\n")
        self._lines.flush()

    def answer(self) -> Any:
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = ""
        if not line:
            self._wait_until_gone()
            raise Died
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply.get("refused") or reply.get("result")

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        if self.is_alive:
            self.signal(signal.SIGKILL)
            self._wait_until_gone()

    def mapped(self, page_bytes: int) -> Counter[int]:
        """Return which pages of host memory the kernel has in this process's tables, and how often."""
        try:
            maps = Path(f"/proc/{self.pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return Counter()
        pages: Counter[int] = Counter()
        for line in maps.splitlines():
            if (found := MAPPED_PAGE.match(line)) is None:
                continue
            start, end, offset = found.groups()
            first = int(offset, 16) // page_bytes
            pages.update(range(first, first + (int(end, 16) - int(start, 16)) // page_bytes))
        return pages

    def _wait_until_gone(self) -> None:
        self.is_alive = False
        self._connection.close()
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        poll = select.poll()
        poll.register(descriptor)
        assert poll.poll(ANSWER_TIMEOUT_S * 1000), "a killed process does not end"
        os.close(descriptor)


# In the process


class DyingBackend:
    """A back end that kills its process right before, or right after, the n-th call of one of its methods."""

    def __init__(self, inner: Any, name: str, count: int, *, after: bool) -> None:
        self._inner, self._name, self._left, self._after = inner, name, count, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._name:
            return found

        def dying(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0 and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = found(*arguments)
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return dying


class Commands:
    """What a pool process can be asked to do."""

    def __init__(self) -> None:
        self.server: Any = None
        self.share: Any = None

    def environment(self, name: str, value: str) -> None:
        os.environ[name] = value

    def create(self, folder: str, pages: int, kind: str, page_bytes: int, places: int) -> int:
        self.ledger, self.backend, self.server = create_pool(Path(folder), pages, kind, page_bytes=page_bytes)
        self.share = PoolShare(self.ledger, self.backend, places)
        return os.getpid()

    def join(self, folder: str, places: int, timeout_s: float = 10.0) -> int:
        self.ledger, self.backend = join_pool(Path(folder), timeout_s=timeout_s)
        self.share = PoolShare(self.ledger, self.backend, places)
        return os.getpid()

    def die_at(self, name: str, count: int, after: bool = False) -> None:
        dying = DyingBackend(self.backend, name, count, after=after)
        self.share._backend = dying
        if self.server is not None:
            self.server._backend = dying

    def acquire(self, places: list[int]) -> list[int]:
        return self.share.acquire(places)

    def give_back(self, places: list[int]) -> None:
        self.share.give_back(places)

    def pages(self) -> dict[int, int]:
        return {place: self.share.page_at(place) for place in range(self.share.places) if self.share.has(place)}

    def fill(self, place: int, value: int) -> None:
        ctypes.memset(self.share.address + place * self.share.page_bytes, value, self.share.page_bytes)

    def content(self, place: int) -> list[int]:
        """Return the different bytes of a page."""
        start = self.share.address + place * self.share.page_bytes
        return sorted(set(ctypes.string_at(start, self.share.page_bytes)))

    def acquire_and_fill(self, places: list[int], value: int) -> list[int]:
        got = self.share.acquire(places)
        for place in got:
            assert self.content(place) == [0], "a page that was taken is not zero"
            self.fill(place, value)
        return got

    def is_filled_with(self, value: int) -> bool:
        return all(self.content(place) == [value] for place in self.pages())

    def churn(self, seed: int) -> None:
        """Take and give back random pages until this process ends."""
        chance = random.Random(seed)
        while True:
            places = list(range(self.share.places))
            chance.shuffle(places)
            some = places[: chance.randint(1, len(places))]
            if chance.random() < 0.5:
                self.share.acquire([place for place in some if not self.share.has(place)])
            else:
                self.share.give_back([place for place in some if self.share.has(place)])

    def report(self, value: int) -> tuple[dict[int, int], int, bool]:
        return self.owners(), self.free_pages(), self.is_filled_with(value)

    def free_pages(self) -> int:
        return self.share.free_pages()

    def owners(self) -> dict[int, int]:
        return self.ledger.owners()

    def serving_pid(self) -> int | None:
        return self.ledger.serving_pid()

    def close(self) -> None:
        self.share.close()
        if self.server is not None:
            self.server.close()
        self.backend.close()
        self.ledger.close()


def serve(connection: socket.socket) -> None:
    commands = Commands()
    lines = connection.makefile("rw", encoding="utf-8")
    for line in lines:
        name, *arguments = json.loads(line)
        try:
            reply = {"result": getattr(commands, name)(*arguments)}
        except RoseError as error:
            reply = {"refused": f"{type(error).__name__}: {error}"}
        except Exception as error:
            reply = {"error": repr(error)}
        lines.write(json.dumps(reply) + "\n")
        lines.flush()


def nurse() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    orders = socket.socket(fileno=os.dup(0))
    children: list[int] = []
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 32, 1)
        if not order:
            break
        pid = os.fork()
        if pid == 0:
            orders.close()
            serve(socket.socket(fileno=descriptors[0]))
            os._exit(0)
        os.close(descriptors[0])
        children.append(pid)
        orders.send(str(pid).encode())
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    nurse()
