"""One engine behind one link: obeys the commands that arrive there and sends back what the engine made.

A device has a port for serving and, if it is lent, another for rollouts; each has a socket of its own, so neither side
can name, see or stop the other's requests. Whoever owns the loop asks a port for its commands between two steps, and
hands it the events of every step of its engine. New weights are loaded by a thread and swapped in when the loop comes
by.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rose.core.decisions import Grant
from rose.coserve import messages
from rose.coserve.device import stand_back
from rose.coserve.link import EngineLink
from rose.engines.base import Budget, Request, StepEngine, StepPlan, TokenEvent
from rose.errors import RequestRefused, RoseError, Unavailable

CLOSED_GATE = Grant(0, 0, 0.0, "no grant yet")
CLOSED_RETRY_S = 5.0  # an owner's word lasts for minutes; whoever asks is not to wait for it here


class Port:
    """`on_add` and `on_gone` tell of requests that came and that were taken out from outside, `on_swap` of weights."""

    def __init__(
        self,
        engine: StepEngine,
        link: EngineLink,
        budget: Budget,
        *,
        now_s: Callable[[], float],
        gated: bool = False,
        on_add: Callable[[Request], None] = lambda request: None,
        on_gone: Callable[[str], None] = lambda request_id: None,
        on_swap: Callable[[], None] = lambda: None,
        on_control: Callable[[messages.Control], None] = lambda control: None,
        on_want: Callable[[bool], None] = lambda is_wanted: None,
        lending: Callable[[], messages.LendingStatus | None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.link = link
        self.leaving = False
        self.closed = ""  # why no request is taken now
        self.source: messages.Stage | None = None  # where the weights that run came from, if they were swapped in
        self._own_budget = budget
        self._now_s = now_s
        self._gated = gated
        self._on_add, self._on_gone, self._on_swap = on_add, on_gone, on_swap
        self._on_control, self._on_want, self._lending = on_control, on_want, lending
        self._grant = CLOSED_GATE
        self._unstarted: set[str] = set()
        self._staged: tuple[messages.Stage, Any] | None = None
        self._staging: threading.Thread | None = None
        self._staging_outcome: tuple[messages.Stage, Any, BaseException | None] | None = None
        self._told_facts = False

    def obey_all(self, most_s: float = math.inf) -> None:
        """Take the commands that have arrived; after this long, leave the rest for the next call.

        Raises Closed without a front.
        """
        until_s = self._now_s() + most_s
        for command in self.link.receive():
            self._obey(command)
            if self._now_s() >= until_s:
                break
        self._finish_staging()

    def budget(self) -> Budget | None:
        """The most a step may do now; None behind a closed gate."""
        own = self._own_budget
        if not self._gated:
            return own
        if not self._grant.is_open(self._now_s()):
            return None
        return Budget(min(own.tokens, self._grant.tokens), min(own.sequences, self._grant.sequences))

    def started_by(self, plan: StepPlan) -> tuple[str, ...]:
        """The requests that have been waiting until this step."""
        if not self._unstarted:
            return ()
        started = tuple(item.request_id for item in plan.items if item.request_id in self._unstarted)
        self._unstarted.difference_update(started)
        return started

    def send_step(self, plan: StepPlan, events: Sequence[TokenEvent], seconds: float, started: tuple[str, ...]) -> None:
        self._send(events, plan.features.new_tokens, seconds, started)

    def send_evicted(self, events: Iterable[TokenEvent]) -> None:
        """Requests that were ended without a step."""
        ended = tuple(events)
        for event in ended:
            self._unstarted.discard(event.request_id)
            self._on_gone(event.request_id)
        self._send(ended)

    def tell_facts(self) -> None:
        """Going to sleep: commands without a step, such as a cancel, have changed the facts too."""
        if not self._told_facts:
            self._send(())

    def tell_lending(self) -> None:
        """Something about lending is new, and nobody asked."""
        self.link.send(messages.Reply(0, self.engine.facts(), self.budget() is not None, lending=self._lending()))

    def _send(
        self, events: Sequence[TokenEvent], step_tokens: int = 0, step_s: float = 0.0, started: tuple[str, ...] = ()
    ) -> None:
        self.link.send(messages.Stepped(tuple(events), self.engine.facts(), step_tokens, step_s, started))
        self._told_facts = True

    # Commands

    def _obey(self, command: messages.Command) -> None:
        self._told_facts = False
        match command:
            case messages.Add():
                self._add(command)
            case messages.Cancel():
                self._cancel(command)
            case messages.Evict():
                self._evict(command)
            case messages.SetGrant():
                self._grant = Grant(command.tokens, command.sequences, command.until_s)
                self._reply(command.tag)
            case messages.KvBudget():
                blocks = max(0, command.budget_bytes) // self.engine.facts().block_bytes
                self.send_evicted(self.engine.limit_kv(blocks))
                self._reply(command.tag)
            case messages.Stage():
                self._start_staging(command)
            case messages.Commit():
                self._commit(command)
            case messages.GetFacts():
                self._reply(command.tag)
            case messages.Control():
                self._answer(command.tag, lambda: self._on_control(command))
            case messages.Want():
                self._answer(command.tag, lambda: self._on_want(command.is_wanted))
            case messages.Shutdown():
                self.leaving = True
            case messages.Start():
                raise AssertionError("started twice")

    def _answer(self, tag: int, obey: Callable[[], None]) -> None:
        try:
            obey()
        except RoseError as error:
            self._reply(tag, error)
            return
        self._reply(tag)

    def _add(self, command: messages.Add) -> None:
        try:
            if self.closed:
                raise Unavailable(self.closed, hint="retry later, or elsewhere", retry_after_s=CLOSED_RETRY_S)
            self.engine.add(command.request)
        except (RequestRefused, Unavailable) as error:
            self.link.send(messages.Refused(command.request.request_id, messages.fault_of(error)))
            return
        self._unstarted.add(command.request.request_id)
        self._on_add(command.request)

    def _cancel(self, command: messages.Cancel) -> None:
        self._unstarted.discard(command.request_id)
        if self.engine.cancel(command.request_id):
            self._on_gone(command.request_id)
        self._reply(command.tag)

    def _evict(self, command: messages.Evict) -> None:
        try:
            self.engine.evict(command.request_id)
        except KeyError:  # finished a moment ago
            self._reply(command.tag)
            return
        self.send_evicted([TokenEvent(command.request_id, (), (), self.engine.facts().version, "abort")])
        self._reply(command.tag)

    def _reply(self, tag: int, error: BaseException | None = None) -> None:
        if tag == 0:
            return
        fault = messages.fault_of(error) if error is not None else None
        staged_version = self._staged[0].version if self._staged else None
        gate_open = self.budget() is not None
        self.link.send(messages.Reply(tag, self.engine.facts(), gate_open, staged_version, fault, self._lending()))

    # Weights

    def _start_staging(self, command: messages.Stage) -> None:
        if self._staging is not None:
            self._reply(command.tag, RequestRefused("another version is being staged", hint="wait for it to finish"))
            return
        self._staging = threading.Thread(target=self._stage, args=(command,), name="stage", daemon=True)
        self._staging.start()

    def _stage(self, command: messages.Stage) -> None:
        """In a thread, so that steps go on; the outcome is handed to the loop by one assignment."""
        stand_back()
        try:
            self._staging_outcome = (command, self.engine.stage(command.version, command.folder), None)
        except Exception as error:
            self._staging_outcome = (command, None, error)
        self.link.wake()

    def _finish_staging(self) -> None:
        if self._staging_outcome is None or self._staging is None:
            return
        command, staged, error = self._staging_outcome
        self._staging.join()
        self._staging = self._staging_outcome = None
        if error is None:
            self._staged = (command, staged)
        self._reply(command.tag, error)

    def _commit(self, command: messages.Commit) -> None:
        if self._staged is None or self._staged[0].version != command.version:
            held = f"`{self._staged[0].version}` is" if self._staged else "nothing is"
            self._reply(command.tag, RequestRefused(f"version `{command.version}` is not staged; {held}"))
            return
        self.engine.swap(self._staged[1])
        self.source, self._staged = self._staged[0], None
        self._on_swap()
        self._reply(command.tag)
