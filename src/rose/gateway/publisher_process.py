"""The process that publishes folders for the gateway: started at the first order, and again after it has died.

The process ends with the gateway, whose end of the pipe it reads. It gets the run's secret and none of the tokens.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from rose.api.faults import error_of
from rose.config.server_settings import ControlSettings
from rose.errors import ConfigError, QueueFull, RoseError, Unavailable
from rose.private_files import without_secrets
from rose.weights.folder_publisher import PublisherSpec, PublishOrder, PublishOutcome
from rose.weights.keys import SECRET, SECRET_FILE, run_secret, write_key
from rose.weights.relay.opening import relay_kind

ORDERS_MAX = 8  # under way: one trainer has one, and repeats it
MODULE = "rose.weights.folder_publisher"
RUN_CHARACTERS_MAX = 100  # of a run's name


class PublisherProcess:
    """Publishes one folder after the other."""

    def __init__(self, spec: PublisherSpec) -> None:
        self.spec = spec
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._orders = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until all earlier callers are done. Raises QueueFull if there are too many."""
        if self._orders >= ORDERS_MAX:
            raise QueueFull(f"{self._orders} folders wait to be published", hint="send one at a time")
        self._orders += 1
        try:
            async with self._lock:
                yield
        finally:
            self._orders -= 1

    async def publish(self, order: PublishOrder) -> PublishOutcome:
        """Return the version that holds the folder's weights; call it in a `turn`. Raises the process's errors."""
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(ConnectionError, RuntimeError):  # it has died: the end of its output says so
                process.stdin.write(msgspec.json.encode(order) + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
            if line:
                outcome = msgspec.json.decode(line, type=PublishOutcome)
        except BaseException:
            self._process = None  # the outcome of this order must not be taken for that of the next
            _kill(process)
            raise
        if not line:
            self._process = None
            what = f"the process that publishes weights ended ({await process.wait()}) while it read the folder"
            raise Unavailable(what, hint="send the request again; do not change files that are being read")
        if outcome.fault is not None:
            raise _stated(error_of(outcome.fault))
        return outcome

    async def close(self) -> None:
        """End the process; a version that it has not committed never appears."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            await process.wait()

    async def _start(self) -> Process:
        environment = without_secrets(os.environ)
        environment |= {name: os.environ[name] for name in (SECRET, SECRET_FILE) if name in os.environ}
        arguments = ("-m", MODULE, msgspec.json.encode(self.spec).decode())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=PIPE, stdout=PIPE, env=environment
        )
        return self._process


def publisher_process(model: Path, name: str, control: ControlSettings) -> PublisherProcess | None:
    """Return the publisher that the settings ask for, or None. Raises ConfigError if it could not publish."""
    if control.folder is None:
        return None
    if control.api is None:
        raise ConfigError("a folder of weights was named, and no routes that read it", hint="add --door vllm")
    if control.relay is None:
        hint = "name one that all workers reach: --door-relay http://host:port, or a folder"
        raise ConfigError("weights from folders are published to a relay, and none was named", hint=hint)
    if not os.path.isdir(control.folder):
        raise ConfigError(f"{control.folder} is not a folder", hint="make it, or correct --door-folder")
    run = control.run or name
    if len(run) > RUN_CHARACTERS_MAX:
        hint = "set control.run to a shorter one"
        raise ConfigError(f"the run's name has more than {RUN_CHARACTERS_MAX} characters", hint=hint)
    write_key(run_secret())
    kind = relay_kind(control.relay)
    relay = os.path.abspath(control.relay.removeprefix("file:")) if kind == "folder" else control.relay
    return PublisherProcess(PublisherSpec(os.path.abspath(model), os.path.abspath(control.folder), relay, run))


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def _stated(error: RoseError) -> RoseError:
    """Return an error that a route can answer with: a relay that cannot be opened may be there later."""
    return Unavailable(error.what, hint=error.hint) if isinstance(error, ConfigError) else error
