"""The processes of a run: started, watched, started again when they die, and ended together.

Each has a session of its own, so that Ctrl-C reaches the run only, which then ends them in good order; and each dies
with the run, however that ends (see child.py). They are started from a thread that is kept for this: it keeps the
priority and the cores that the run itself has given up, and the kernel ties a child's life to the thread that made it.

The output of a process goes to its log in the run folder, of which the newest megabytes are kept. A *kept* process is
started again when it dies, unless it died too often within a short time; the death of any other ends the run, with the
end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rose.device.supervision import settle, supervise
from rose.errors import Unavailable
from rose.private_files import without_secrets
from rose.run.rotating import RotatingFile

START_S_MAX = 180.0  # a first start compiles the kernels; later ones find them in the cache
POLITE_S_MAX, STOP_S_MAX = 1.0, 10.0
DEATHS_MAX, DEATHS_WITHIN_S = 5, 120.0
PAUSE_S = 0.5
TAIL_CHARACTERS = 1500
LINE_BYTES_MAX = 1 << 20  # what comes without a newline is cut there
LOG_BYTES_MAX = 16 << 20  # of one file; with the one before it a process keeps at most twice that
URL = r"(http://[^\s/]+)"


@dataclass(frozen=True, slots=True)
class Command:
    """How a process is started. It is ready when its output has matched every pattern; each captures one word."""

    role: str
    arguments: tuple[str, ...]
    niceness: int = 0
    cores: tuple[int, ...] = ()
    patterns: dict[str, str] = field(default_factory=dict)
    is_kept: bool = False
    input: bytes | None = None
    secrets: frozenset[str] = frozenset()  # variables of the run's secrets that it needs


@dataclass(frozen=True, slots=True)
class Died:
    """A process that ended by itself."""

    role: str
    code: int
    is_restarted: bool


OnJson = Callable[[bytes], None]
OnLine = Callable[[bytes], None]


class Running:
    """One process. `captured` holds what its patterns matched; `on_json` gets its lines of JSON."""

    def __init__(
        self,
        command: Command,
        process: subprocess.Popen[bytes],
        log: Path,
        on_json: OnJson | None,
        on_line: OnLine | None = None,
    ) -> None:
        self.command, self.process, self.log = command, process, log
        self.captured: dict[str, str] = {}
        self.began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        self.ended = loop.create_future()
        self._on_json, self._on_line, self._rest = on_json, on_line, b""
        self._news = asyncio.Event()
        self._file = RotatingFile(log, LOG_BYTES_MAX)
        descriptor = os.pidfd_open(process.pid)

        def on_end() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self._read_output()
            self.ended.set_result(process.wait())
            self._news.set()

        loop.add_reader(descriptor, on_end)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        loop.add_reader(process.stdout.fileno(), self._read_output)

    @property
    def process_id(self) -> int:
        return self.process.pid

    @property
    def is_ready(self) -> bool:
        return self.captured.keys() >= self.command.patterns.keys()

    async def until_ready(self) -> None:
        """Wait until the process is ready. Raises Unavailable with the end of its log if it ends or takes too long."""
        deadline_s = self.began_s + START_S_MAX
        while not self.is_ready:
            self._news.clear()
            if self.ended.done():
                raise Unavailable(f"{self.command.role} stopped while starting:\n{self.tail()}", hint="rose doctor")
            if time.monotonic() > deadline_s:
                what = f"{self.command.role} was not ready within {START_S_MAX:.0f} s:\n{self.tail()}"
                raise Unavailable(what, hint="rose doctor")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._news.wait()

    async def stop(self) -> None:
        """Send SIGTERM twice, the second time without waiting for requests, then kill it and all it has started."""
        for patience_s in (POLITE_S_MAX, STOP_S_MAX):
            if not self.ended.done():
                self.process.send_signal(signal.SIGTERM)
                await asyncio.wait([self.ended], timeout=patience_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.ended

    def tail(self) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_CHARACTERS))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return "(no output)"

    def _read_output(self) -> None:
        pipe = self.process.stdout
        if pipe is None or pipe.closed:
            return
        try:
            while data := os.read(pipe.fileno(), 1 << 16):
                self._take(data)
        except BlockingIOError:
            return
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        pipe.close()
        self._file.close()

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            if self._on_json is not None and line.startswith(b"{"):
                self._on_json(line)
                continue
            with contextlib.suppress(OSError):  # a full disk is no reason to lose the process
                self._file.write(line + b"\n")
            if self._on_line is not None:
                self._on_line(line)
            for name, pattern in self.command.patterns.items():
                if match := re.search(pattern, line.decode(errors="replace")):
                    self.captured[name] = match[1]
                    self._news.set()


class Processes:
    """The processes of one run. `on_death` is called for every one that ends by itself, `on_line` for lines of logs."""

    def __init__(
        self,
        logs: Path,
        secrets: Mapping[str, str],
        on_death: Callable[[Died], None],
        on_line: OnLine | None = None,
    ) -> None:
        self.failed: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self._logs, self._secrets, self._on_death, self._on_line = logs, secrets, on_death, on_line
        self._starter = ThreadPoolExecutor(1, "starter")
        self._running: dict[str, Running] = {}
        self._keepers: list[asyncio.Task[None]] = []
        logs.mkdir(parents=True, exist_ok=True)

    async def prepare(self) -> None:
        """Make the thread that starts processes, before this one changes its own priority and cores."""
        await asyncio.get_running_loop().run_in_executor(self._starter, lambda: None)

    async def start(self, command: Command, on_json: OnJson | None = None) -> Running:
        """Start a process, and wait until it is ready."""
        running = await self._launch(command, on_json)
        await running.until_ready()
        keeper = supervise(self._keep(command, on_json), f"the keeper of {command.role}", partial(settle, self.failed))
        self._keepers.append(keeper)
        return running

    def get(self, role: str) -> Running | None:
        """Return the process that has this role now."""
        return self._running.get(role)

    def process_ids(self) -> dict[str, int]:
        return {role: running.process_id for role, running in self._running.items() if not running.ended.done()}

    async def close(self) -> None:
        """Stop all processes at once; a second call does nothing."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(running.stop() for running in self._running.values()))
        self._running.clear()
        self._starter.shutdown()

    async def _launch(self, command: Command, on_json: OnJson | None) -> Running:
        check_command_line(command, self._secrets)
        # The process gets only those secrets that its command needs.
        needed = {name: value for name, value in self._secrets.items() if name in command.secrets}
        cores = ",".join(map(str, command.cores))
        prefix = [sys.executable, "-m", "rose.run.child", str(os.getpid()), str(command.niceness), cores]

        def popen() -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [*prefix, sys.executable, *command.arguments],
                stdin=subprocess.PIPE if command.input is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=without_secrets(os.environ) | needed,
                start_new_session=True,
            )
            if command.input is not None:
                assert process.stdin is not None
                with contextlib.suppress(OSError), process.stdin as pipe:
                    pipe.write(command.input)
            return process

        log = self._logs / f"{command.role}.log"
        started = asyncio.get_running_loop().run_in_executor(self._starter, popen)
        try:
            process = await asyncio.shield(started)
        except asyncio.CancelledError:  # `close` must know every process that was started
            process = await started
            self._running[command.role] = Running(command, process, log, on_json, self._on_line)
            raise
        self._running[command.role] = running = Running(command, process, log, on_json, self._on_line)
        return running

    async def _keep(self, command: Command, on_json: OnJson | None) -> None:
        deaths: list[float] = []
        while True:
            running = self._running[command.role]
            code = await asyncio.shield(running.ended)
            now_s = time.monotonic()
            deaths = [at_s for at_s in deaths if now_s - at_s < DEATHS_WITHIN_S] + [now_s]
            is_restarted = command.is_kept and len(deaths) < DEATHS_MAX
            self._on_death(Died(command.role, code, is_restarted))
            if not is_restarted:
                how = f"signal {-code}" if code < 0 else f"code {code}"
                again = f" for the {len(deaths)}th time within {DEATHS_WITHIN_S:.0f} s"
                how += again if len(deaths) >= DEATHS_MAX else ""
                what = f"{command.role} ended with {how}:\n{running.tail()}"
                settle(self.failed, Unavailable(what, hint=f"see {running.log}"))
                return
            await asyncio.sleep(PAUSE_S * len(deaths))
            await self._launch(command, on_json)


def check_command_line(command: Command, secrets: Mapping[str, str]) -> None:
    line = "\0".join(command.arguments)
    shown = [name for name, secret in secrets.items() if not name.endswith("_FILE") and secret in line]
    assert not shown, f"every user can read a command line, and {command.role}'s holds {shown}"


def roses(*arguments: str) -> tuple[str, ...]:
    """Return the command line of a `rose` command."""
    return ("-m", "rose", *arguments)
