"""A rollout engine as a process: started, waited for, ended with everything it started. Its words go to a log file."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import aiohttp

from rose.engines.vllm.desk import control_sheet
from rose.engines.vllm.finding import own_folder, own_name, sweep
from rose.engines.vllm.starting import RolloutEngine, check, command, environment, in_child, socket_path
from rose.engines.vllm.talking import URL, connector
from rose.engines.vllm.worker import VllmWorker
from rose.errors import Unavailable

READY_S = 300.0  # a large model on a busy machine
LOG_LINES = 12
LOG_BYTES_MAX, LOG_BYTES_KEPT = 8 << 20, 1 << 20
END_S = 5.0  # it has nothing to save


class EngineProcess:
    """One run of one rollout engine. `worker` is there once `start` has returned."""

    def __init__(self, engine: RolloutEngine) -> None:
        check(engine)
        self.engine = engine
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=f"desk-{own_name()}-", dir=own_folder()))
        self.log = self.folder / "engine.log"
        self.worker: VllmWorker
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return socket_path(self.folder)

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> VllmWorker:
        """Raises Unavailable, with the engine's last words, if it does not come up."""
        control = control_sheet(self.folder, create=True)
        with self.log.open("ab") as log:  # appended to, so that it can be cut while the engine writes
            self._process = subprocess.Popen(
                command(self.engine, self.folder),
                env=environment(self.engine, self.folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=in_child(self.engine),
            )
        await self._ready()
        self.worker = await VllmWorker.attach(self.socket, self.folder, control, lambda: self.is_running)
        self.worker.is_seeded = not self.engine.is_cpu
        return self.worker

    async def _ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        async with aiohttp.ClientSession(connector=connector(self.socket)) as http:
            while time.monotonic() < deadline_s:
                if not self.is_running:
                    raise Unavailable(f"the rollout engine did not start; its last words:\n{self.last_words()}")
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with http.get(URL + "/health", timeout=aiohttp.ClientTimeout(5)) as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)
        raise Unavailable(f"the rollout engine was not ready within {READY_S:g} s:\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of its log; an exception's line is worth more than the traceback around it."""
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            said = [line for line in lines if "Error" in line] or lines
            return "\n".join(f"  {line[-300:]}" for line in said[-LOG_LINES:])
        return "  (none)"

    def cut_log(self) -> None:
        """Keep the newest part of a log that has grown large: it lies in memory, beside what serving needs."""
        with suppress(OSError), self.log.open("r+b") as log:
            size = log.seek(0, os.SEEK_END)
            if size > LOG_BYTES_MAX:
                log.seek(size - LOG_BYTES_KEPT)
                newest = log.read()
                log.truncate(0)
                log.seek(0)
                log.write(newest)

    def kill(self) -> None:
        """At once, with everything it started."""
        if self._process is not None:
            _signal(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """The engine and whatever it started are gone when this returns."""
        if hasattr(self, "worker"):
            await self.worker.close()
        if self._process is not None:
            _signal(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, END_S)
            _signal(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
        shutil.rmtree(self.folder, ignore_errors=True)


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
