"""The engine process of a device, pinned to its cores, without asyncio and without HTTP, and the loop of one engine.

Between two steps the loop takes all commands that have arrived; then it plans, steps, and sends one message with every
token of the step. An error inside a step is the engine's end: it reports the error and exits, and the front starts
another one. The process also exits when the front does, by the end of the socket's stream or by the kernel's signal.

    python -m rose.device.executor SOCKET_FD PARENT_PID [ROLLOUT_LISTENER_FD]
"""

from __future__ import annotations

import gc
import importlib
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose.api.faults import fault_of
from rose.config.server_settings import cores_of
from rose.device import engine_messages
from rose.device.coserving_executor import CoServingExecutor
from rose.device.coserving_factory import load_coserving
from rose.device.engine_server import EngineServer
from rose.device.os_process import die_with_parent, pin
from rose.device.transport import Closed, EngineLink, RolloutListener
from rose.engines.base import Budget, StepEngine
from rose.errors import RoseError

DRAIN_S = 1.0  # to get the reason of the end out


class Executor:
    """The loop of one engine for one front. `run` returns after a Shutdown, and raises Closed without a front."""

    def __init__(self, engine: StepEngine, link: EngineLink, budget: Budget) -> None:
        self._engine, self._link, self._budget = engine, link, budget
        self._server = EngineServer(engine, link, now_s=time.monotonic)

    def run(self) -> None:
        while True:
            self._server.handle_commands()
            if self._server.is_leaving:
                return
            plan = None if self._link.is_congested else self._engine.plan(self._budget)
            if plan is not None:
                self._server.run_step(plan)
            else:
                self._server.send_facts()
                self._link.wait()


def serve(connection: socket.socket, rollouts: socket.socket | None = None) -> int:
    """Take the start command, load what it names and run it; return the exit code of the process."""
    link = EngineLink(connection)
    try:
        while not (commands := list(link.receive())):
            link.wait()
        start = commands[0]
        assert isinstance(start, engine_messages.StartEngine), f"started by {start}"
        assert len(commands) == 1, "commands before the engine was ready"
        _load(start, link, RolloutListener(rollouts) if rollouts is not None else None).run()
    except Closed:
        return 0
    except Exception as error:  # whatever it was, the front gets the reason and starts another engine
        if not isinstance(error, RoseError):
            traceback.print_exc()
        link.send(engine_messages.EngineFailed(fault_of(error)))
        return error.exit_code if isinstance(error, RoseError) else 1
    finally:
        link.drain(DRAIN_S)
    return 0


def _load(
    start: engine_messages.StartEngine, link: EngineLink, listener: RolloutListener | None
) -> Executor | CoServingExecutor:
    pin(cores_of(start.device))
    link.send(
        engine_messages.StartProgress(f"loading {start.folder} on {start.device} (the first start also compiles, once)")
    )
    if start.lend is not None:
        assert listener is not None, "a device to lend without a rollout listener"
        return load_coserving(start, start.lend, link, listener)
    module, _, name = start.factory.partition(":")
    factory: Any = importlib.import_module(module)
    for part in name.split("."):
        factory = getattr(factory, part)
    engine = factory(Path(start.folder), settings=start.settings, device=start.device)
    # What was loaded lives as long as the process: the collector need not look at it again between steps.
    gc.collect()
    gc.freeze()
    link.send(engine_messages.Ready(engine.facts()))
    return Executor(engine, link, Budget(start.settings.max_step_tokens, start.settings.max_sequences))


def main(arguments: Sequence[str]) -> int:
    descriptor, parent_pid, *listener = (int(argument) for argument in arguments)
    die_with_parent(parent_pid)
    # Ctrl-C and a service manager's stop reach the whole group; the front decides when the engine goes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return serve(socket.socket(fileno=descriptor), *[socket.socket(fileno=number) for number in listener])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
