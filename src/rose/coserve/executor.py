"""The loop of one device: the engine process, pinned to its cores, without asyncio and without HTTP.

Between two steps it takes all commands that have arrived; then it plans, steps, and sends one message with every token
of the step. With nothing to do it sleeps in `poll`. A gated executor steps only under a grant that has not expired, so
a controller that died leaves a closed gate behind. New weights are loaded by a thread and swapped in between two steps.

An error inside a step is the engine's end: it says so and leaves, and the front starts another one. The process also
leaves when the front does, by the end of the socket's stream or by the kernel's death signal.

    python -m rose.coserve.executor SOCKET_FD PARENT_PID
"""

from __future__ import annotations

import gc
import importlib
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose.core.decisions import Grant
from rose.coserve import messages
from rose.coserve.device import check_device, die_with_parent, pin
from rose.coserve.link import Closed, EngineLink
from rose.engines.base import Budget, StepEngine, StepPlan, TokenEvent
from rose.errors import RequestRefused, RoseError

LAST_WORDS_S = 1.0
CLOSED_GATE = Grant(0, 0, 0.0, "no grant yet")


class Executor:
    """Owns one engine and obeys one link. `run` returns when told to shut down and raises Closed without a front."""

    def __init__(self, engine: StepEngine, link: EngineLink, budget: Budget, *, gated: bool = False) -> None:
        self._engine = engine
        self._link = link
        self._own_budget = budget
        self._gated = gated
        self._grant = CLOSED_GATE
        self._unstarted: set[str] = set()
        self._staged: tuple[str, Any] | None = None
        self._staging: threading.Thread | None = None
        self._staging_outcome: tuple[messages.Stage, Any, BaseException | None] | None = None
        self._told_facts = False
        self._leaving = False

    def run(self) -> None:
        while True:
            for command in self._link.receive():
                self._obey(command)
            self._finish_staging()
            if self._leaving:
                return
            if self._link.congested or not self._step():
                self._tell_facts()
                self._link.wait()

    # Stepping

    def _step(self) -> bool:
        """One step, if there is something to run and leave to run it."""
        budget = self._budget(time.monotonic())
        plan = self._engine.plan(budget) if budget is not None else None
        if plan is None:
            return False
        started = self._started_by(plan)
        begin_s = time.monotonic()
        events = self._engine.step(plan)
        self._send_events(events, plan.features.new_tokens, time.monotonic() - begin_s, started)
        return True

    def _started_by(self, plan: StepPlan) -> tuple[str, ...]:
        if not self._unstarted:
            return ()
        started = tuple(item.request_id for item in plan.items if item.request_id in self._unstarted)
        self._unstarted.difference_update(started)
        return started

    def _budget(self, now_s: float) -> Budget | None:
        own = self._own_budget
        if not self._gated:
            return own
        if not self._grant.is_open(now_s):
            return None
        return Budget(min(own.tokens, self._grant.tokens), min(own.sequences, self._grant.sequences))

    def _send_events(
        self, events: Sequence[TokenEvent], step_tokens: int = 0, step_s: float = 0.0, started: tuple[str, ...] = ()
    ) -> None:
        self._link.send(messages.Stepped(tuple(events), self._engine.facts(), step_tokens, step_s, started))
        self._told_facts = True

    def _tell_facts(self) -> None:
        """Going to sleep: commands without a step, such as a cancel, have changed the facts too."""
        if not self._told_facts:
            self._send_events(())

    # Commands

    def _obey(self, command: messages.Command) -> None:
        self._told_facts = False
        match command:
            case messages.Add():
                self._add(command)
            case messages.Cancel():
                self._unstarted.discard(command.request_id)
                self._engine.cancel(command.request_id)
                self._reply(command.tag)
            case messages.Evict():
                self._evict(command)
            case messages.SetGrant():
                self._grant = Grant(command.tokens, command.sequences, command.until_s)
                self._reply(command.tag)
            case messages.KvBudget():
                self._limit_kv(command)
            case messages.Stage():
                self._start_staging(command)
            case messages.Commit():
                self._commit(command)
            case messages.GetFacts():
                self._reply(command.tag)
            case messages.Shutdown():
                self._leaving = True
            case messages.Start():
                raise AssertionError("started twice")

    def _add(self, command: messages.Add) -> None:
        try:
            self._engine.add(command.request)
            self._unstarted.add(command.request.request_id)
        except RequestRefused as error:
            self._link.send(messages.Refused(command.request.request_id, messages.fault_of(error)))

    def _limit_kv(self, command: messages.KvBudget) -> None:
        events = self._engine.limit_kv(max(0, command.budget_bytes) // self._engine.facts().block_bytes)
        self._unstarted.difference_update(event.request_id for event in events)
        self._send_events(events)
        self._reply(command.tag)

    def _evict(self, command: messages.Evict) -> None:
        self._unstarted.discard(command.request_id)
        try:
            self._engine.evict(command.request_id)
        except KeyError:  # finished a moment ago
            self._reply(command.tag)
            return
        version = self._engine.facts().version
        self._send_events([TokenEvent(command.request_id, (), (), version, "abort")])
        self._reply(command.tag)

    def _reply(self, tag: int, error: BaseException | None = None) -> None:
        if tag == 0:
            return
        fault = messages.fault_of(error) if error is not None else None
        gate_open = self._budget(time.monotonic()) is not None
        staged_version = self._staged[0] if self._staged else None
        self._link.send(messages.Reply(tag, self._engine.facts(), gate_open, staged_version, fault))

    # Weights

    def _start_staging(self, command: messages.Stage) -> None:
        if self._staging is not None:
            self._reply(command.tag, RequestRefused("another version is being staged", hint="wait for it to finish"))
            return
        self._staging = threading.Thread(target=self._stage, args=(command,), name="stage", daemon=True)
        self._staging.start()

    def _stage(self, command: messages.Stage) -> None:
        """In a thread, so that steps go on; the outcome is handed to the loop by one assignment."""
        try:
            self._staging_outcome = (command, self._engine.stage(command.version, command.folder), None)
        except Exception as error:
            self._staging_outcome = (command, None, error)
        self._link.wake()

    def _finish_staging(self) -> None:
        if self._staging_outcome is None or self._staging is None:
            return
        command, staged, error = self._staging_outcome
        self._staging.join()
        self._staging = self._staging_outcome = None
        if error is None:
            self._staged = (command.version, staged)
        self._reply(command.tag, error)

    def _commit(self, command: messages.Commit) -> None:
        if self._staged is None or self._staged[0] != command.version:
            held = f"`{self._staged[0]}` is" if self._staged else "nothing is"
            self._reply(command.tag, RequestRefused(f"version `{command.version}` is not staged; {held}"))
            return
        self._engine.swap(self._staged[1])
        self._staged = None
        self._reply(command.tag)


def serve(connection: socket.socket) -> int:
    """Take the start command, load the engine, run it; the exit code of the process."""
    link = EngineLink(connection)
    try:
        _load(_first_command(link), link).run()
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


def _load(start: messages.Start, link: EngineLink) -> Executor:
    pin(check_device(start.device))
    link.send(messages.Progress(f"loading {start.folder} on {start.device} (the first start also compiles, once)"))
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
    descriptor, parent_pid = (int(word) for word in arguments)
    die_with_parent(parent_pid)
    # Ctrl-C and a service manager's stop reach the whole group; the front decides when the engine goes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
