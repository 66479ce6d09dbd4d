"""The loop of one device: the engine process, pinned to its cores, without asyncio and without HTTP.

Between two steps it takes all commands that have arrived; then it plans, steps, and sends one message with every token
of the step. With nothing to do it sleeps in `poll`. A gated executor steps only under a grant that has not expired, so
a controller that died leaves a closed gate behind. New weights are loaded by a thread and swapped in between two steps.

An error inside a step is the engine's end: it says so and leaves, and the front starts another one. The process also
leaves when the front does, by the end of the socket's stream or by the kernel's death signal.

    python -m rose.coserve.executor SOCKET_FD PARENT_PID [DOOR_FD]

A device that is lent has a door for the rollouts' front besides (door.py).
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

from rose.config.device import cores_of
from rose.coserve import messages
from rose.coserve.device import die_with_parent, pin
from rose.coserve.door import Door
from rose.coserve.lent import LentExecutor
from rose.coserve.lent_start import load_lent
from rose.coserve.link import Closed, EngineLink
from rose.coserve.port import Port
from rose.engines.base import Budget, StepEngine
from rose.errors import RoseError

LAST_WORDS_S = 1.0


class Executor:
    """Runs one engine for one front. `run` returns when told to shut down and raises Closed without a front."""

    def __init__(self, engine: StepEngine, link: EngineLink, budget: Budget, *, gated: bool = False) -> None:
        self._engine = engine
        self._link = link
        self._port = Port(engine, link, budget, now_s=time.monotonic, gated=gated)

    def run(self) -> None:
        port = self._port
        while True:
            port.obey_all()
            if port.leaving:
                return
            if self._link.congested or not self._step():
                port.tell_facts()
                self._link.wait()

    def _step(self) -> bool:
        """One step, if there is something to run and leave to run it."""
        budget = self._port.budget()
        plan = self._engine.plan(budget) if budget is not None else None
        if plan is None:
            return False
        started = self._port.started_by(plan)
        begin_s = time.monotonic()
        events = self._engine.step(plan)
        self._port.send_step(plan, events, time.monotonic() - begin_s, started)
        return True


def serve(connection: socket.socket, door: socket.socket | None = None) -> int:
    """Take the start command, load what it names, run it; the exit code of the process."""
    link = EngineLink(connection)
    try:
        _load(_first_command(link), link, Door(door) if door is not None else None).run()
    except Closed:
        return 0
    except Exception as error:  # whatever it was, the front is told and starts another engine
        if not isinstance(error, RoseError):
            traceback.print_exc()
        link.send(messages.Failed(messages.fault_of(error)))
        return error.exit_code if isinstance(error, RoseError) else 1
    finally:
        link.drain(LAST_WORDS_S)
    return 0


def _load(start: messages.Start, link: EngineLink, door: Door | None) -> Executor | LentExecutor:
    pin(cores_of(start.device))
    link.send(messages.Progress(f"loading {start.folder} on {start.device} (the first start also compiles, once)"))
    if start.lend is not None:
        assert door is not None, "a device to lend without a door for rollouts"
        lent = load_lent(start, start.lend, link, door)
        lent.take_over(start.lend)
        return lent
    module, _, name = start.factory.partition(":")
    factory: Any = importlib.import_module(module)
    for part in name.split("."):
        factory = getattr(factory, part)
    engine = factory(Path(start.folder), settings=start.settings, device=start.device)
    # What was loaded lives as long as the process: the collector need not look at it again between steps.
    gc.collect()
    gc.freeze()
    link.send(messages.Ready(engine.facts()))
    budget = Budget(start.settings.max_step_tokens, start.settings.max_sequences)
    return Executor(engine, link, budget, gated=start.gated)


def _first_command(link: EngineLink) -> messages.Start:
    while not (commands := list(link.receive())):
        link.wait()
    start = commands[0]
    assert isinstance(start, messages.Start), f"started by {start}"
    assert len(commands) == 1, "commands before the engine was ready"
    return start


def main(arguments: Sequence[str]) -> int:
    descriptor, parent_pid, *door = (int(word) for word in arguments)
    die_with_parent(parent_pid)
    # Ctrl-C and a service manager's stop reach the whole group; the front decides when the engine goes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return serve(socket.socket(fileno=descriptor), *[socket.socket(fileno=number) for number in door])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
