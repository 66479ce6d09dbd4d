"""The rollout front: a process of its own beside the serving front of a lent device.

Rollouts come by the hundred per second, in batches, and a server that answered them between two serving requests would
make users wait for its Python. So they have their own process, at a lower priority, with a port that the serving front
binds and hands over. The process dies with the serving front, and is started again if it dies alone.

    python -m rose.device.rollout_front PARENT_PID    (its arguments come as one JSON line on standard input)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from rose.config.server_settings import RolloutFrontSettings
from rose.device.channel_client import RemoteEngineConnector
from rose.device.device_server import SidecarTask, answer_until, sidecar_running
from rose.device.os_process import die_with_parent
from rose.device.supervision import supervise
from rose.engines.process_keeper import ChildProcess, RestartPolicy, keep_running
from rose.errors import RoseError, Unavailable
from rose.models.model_folder import load_model_folder
from rose.observe.log_format import configure_logs
from rose.observe.metrics import Metrics
from rose.openai.access import API_KEY_VARIABLE, OWNER_VARIABLE
from rose.openai.http_context import HttpContext
from rose.openai.http_server import Signals
from rose.openai.loops import loop_factory

logger = logging.getLogger("rose.device")

NICENESS = 5  # below serving, above trainers
NOT_FOR_ROLLOUTS = (OWNER_VARIABLE, API_KEY_VARIABLE)  # keys that this process has no use for
# A front that lived for a minute had worked: its death starts a new count.
RESTARTS = RestartPolicy(pause_first_s=0.5, pause_longest_s=30.0, healthy_s=60.0)
SHUTDOWN_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class RolloutFront:
    """The arguments of the process."""

    folder: str
    name: str | None
    address: str  # of the engine's rollout listener
    listener: int  # a descriptor
    token: str
    settings: RolloutFrontSettings
    requests_max: int
    sidecar: SidecarTask | None = None


class RolloutProcess:
    """The rollout front, kept running. The listener stays open here, so no client ever finds the port closed."""

    def __init__(self, arguments: RolloutFront) -> None:
        self._arguments = arguments
        self._process: ChildProcess | None = None
        self._keeper = supervise(self._keep(), "the supervisor of the rollout front", self._on_failure)

    @property
    def process_id(self) -> int | None:
        return self._process.process_id if self._process is not None else None

    async def close(self) -> None:
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None:
            await self._process.stop(SHUTDOWN_GRACE_S)

    async def _keep(self) -> None:
        await keep_running(
            self._run_once, RESTARTS, lambda why, pause_s: logger.error("%s; starting it again in %g s", why, pause_s)
        )

    def _on_failure(self, reason: Unavailable) -> None:
        """Report the defect; serving goes on, and so do rollouts as long as their front lives."""
        logger.error("the rollout front is not started again if it ends: %s", reason.what)

    async def _run_once(self) -> str:
        """Start the process, wait for its end, and return what happened."""
        try:
            process = self._process = ChildProcess(self._start(), "the rollout front")
        except OSError as error:  # no process, memory or descriptor to be had just now
            return f"the rollout front cannot be started: {error.strerror}"
        await process.ended()
        return await process.exit_reason(SHUTDOWN_GRACE_S)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "rose.device.rollout_front", str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=[self._arguments.listener],
            env={name: value for name, value in os.environ.items() if name not in NOT_FOR_ROLLOUTS},
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(asdict(self._arguments)))
        return process


async def run(arguments: RolloutFront) -> None:
    """Answer rollouts until a signal comes or the engine's connector gives up."""
    signals = Signals()
    listener = socket.socket(fileno=arguments.listener)
    connector = RemoteEngineConnector(arguments.address, arguments.requests_max)
    engine = connector.client
    try:
        await signals.interrupts(connector.start())
        folder, metrics = load_model_folder(Path(arguments.folder)), Metrics()
        context = HttpContext.build(
            folder, arguments.name, arguments.settings, engine, metrics=metrics, token=arguments.token
        )
        engine.events.steps.subscribe(context.metrics.observe)
        async with sidecar_running(engine, metrics, arguments.sidecar):
            await answer_until(context, engine, listener, signals, lambda what: None, on_open=lambda: None)
    finally:
        await engine.close()


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    configure_logs(role="rollouts")
    arguments = msgspec.json.decode(sys.stdin.buffer.read(), type=RolloutFront)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(arguments))
    except KeyboardInterrupt:
        return 0
    except RoseError as error:
        logger.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
