"""The rollouts' front: a process of its own beside the serving front of a lent device.

Rollouts come by the hundred per second, in batches, and a server that answers them between two serving requests would
make users wait for its Python. So they have their own process, at a lower priority, with its own port, which the
serving front takes and hands over; it dies with the serving front, and is started again if it dies alone.

    python -m rose.front.rollouts    (its settings come as one JSON line on standard input)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from rose.config.device import RolloutFrontSettings
from rose.coserve.device import die_with_parent
from rose.coserve.supervision import supervise
from rose.errors import RoseError, Unavailable
from rose.front.building import build_front
from rose.front.companion import Companion, accompanied
from rose.front.listening import Signals, answer_until
from rose.front.loops import loop_factory
from rose.front.seat import Seat
from rose.front.tokens import API_KEY_VARIABLE, OWNER_VARIABLE
from rose.models.folder import load_model_folder
from rose.observe.metrics import Metrics

logger = logging.getLogger("rose.front")

NICENESS = 5  # below serving, above trainers
NOT_FOR_ROLLOUTS = (OWNER_VARIABLE, API_KEY_VARIABLE)  # keys that this process has no use for
PAUSE_FIRST_S, PAUSE_LONGEST_S = 0.5, 30.0
HEALTHY_S = 60.0  # one that lived longer had worked: its death starts a new count
LEAVE_S = 3.0


@dataclass(frozen=True, slots=True)
class RolloutFront:
    """What the process is told."""

    folder: str
    name: str | None
    address: str  # of the engine's door
    listener: int  # a descriptor
    token: str
    settings: RolloutFrontSettings
    requests_max: int
    companion: Companion | None = None


class RolloutProcess:
    """Keeps the rollouts' front running. The listener stays open here, so no client ever finds the port closed."""

    def __init__(self, told: RolloutFront) -> None:
        self._told = told
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = supervise(self._keep(), "the supervisor of the rollouts' front", self._on_failure)

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def close(self) -> None:
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is None:
            return
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _keep(self) -> None:
        pause_s = PAUSE_FIRST_S
        while True:
            begin_s = time.monotonic()
            what = await self._run_once()
            if time.monotonic() - begin_s > HEALTHY_S:
                pause_s = PAUSE_FIRST_S
            logger.error("%s; starting it again in %g s", what, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_LONGEST_S, 2 * pause_s)

    def _on_failure(self, reason: Unavailable) -> None:
        """Serving goes on, and so do rollouts as long as their front lives; only its restarts have ended."""
        logger.error("the rollouts' front is not started again if it ends: %s", reason.what)

    async def _run_once(self) -> str:
        """Start the process and wait for its end; what happened."""
        try:
            self._process = process = self._start()
        except OSError as error:  # no process, memory or descriptor to be had just now
            return f"the rollouts' front cannot be started: {error.strerror}"
        return f"the rollouts' front left with code {await _ended(process)}"

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "rose.front.rollouts", str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=[self._told.listener],
            env={name: value for name, value in os.environ.items() if name not in NOT_FOR_ROLLOUTS},
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(asdict(self._told)))
        return process


async def _ended(process: subprocess.Popen[bytes]) -> int:
    while (code := process.poll()) is None:
        await asyncio.sleep(0.2)
    return code


async def run(told: RolloutFront, say: Callable[[str], None] = lambda what: None) -> None:
    signals = Signals()
    listener = socket.socket(fileno=told.listener)
    seat = Seat(told.address, told.requests_max)
    try:
        await signals.interrupts(seat.start())
        folder, figures = load_model_folder(Path(told.folder)), Metrics()
        front = build_front(folder, told.name, told.settings, seat, metrics=figures, token=told.token)
        seat.on_step = front.metrics.observe
        async with accompanied(seat, figures, told.companion):
            await answer_until(front, listener, signals, say, on_open=lambda: None)
    finally:
        await seat.close()


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    os.nice(NICENESS)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s rollouts: %(message)s", stream=sys.stderr)
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=RolloutFront)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run(told))
    except KeyboardInterrupt:
        return 0
    except RoseError as error:
        logger.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
