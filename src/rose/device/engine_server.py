"""The RPC server of one engine: carries out the commands of one connection, and sends back what the engine made.

A device has one for serving and, if it is lent, another for rollouts. Each has a socket of its own, so neither side can
name, see or stop the other's requests. The executor has it carry out commands between two steps, and run every step. A
thread loads new weights; they are swapped in at the next call of the executor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rose.api.faults import fault_of
from rose.device import engine_messages
from rose.device.os_process import lower_priority
from rose.device.transport import EngineLink
from rose.engines.base import LendingStatus, Request, StepEngine, Stepped, StepPlan, TokenEvent
from rose.engines.recorded_steps import RecordedSteps
from rose.errors import RequestRefused, RoseError, Unavailable

CLOSED_RETRY_S = 5.0  # an admin command holds for minutes: the client should not wait for its end here


class WeightLoader:
    """A thread of low priority that stages weights while steps go on; the loop takes the outcome between two steps."""

    def __init__(self, engine: StepEngine, wake: Callable[[], None]) -> None:
        self._engine, self._wake = engine, wake
        self._thread: threading.Thread | None = None
        self._outcome: tuple[engine_messages.Stage, Any, Exception | None] | None = None

    @property
    def is_loading(self) -> bool:
        return self._thread is not None

    def start(self, source: engine_messages.Stage) -> None:
        self._thread = threading.Thread(target=self._load, args=(source,), name="weights", daemon=True)
        self._thread.start()

    def take(self) -> tuple[engine_messages.Stage, Any, Exception | None] | None:
        """Return the source, the staged weights, and the error if there are none; None until the thread is done."""
        outcome, thread = self._outcome, self._thread
        if outcome is None or thread is None:
            return None
        thread.join()
        self._outcome = self._thread = None
        return outcome

    def _load(self, source: engine_messages.Stage) -> None:
        lower_priority()
        try:
            self._outcome = (source, self._engine.stage(source.version, source.folder), None)
        except Exception as error:
            self._outcome = (source, None, error)
        self._wake()


class EngineServer:
    """The server of one engine. `on_add` and `on_gone` get requests that came and went."""

    def __init__(
        self,
        engine: StepEngine,
        link: EngineLink,
        *,
        now_s: Callable[[], float],
        on_add: Callable[[Request], None] = lambda request: None,
        on_gone: Callable[[str], None] = lambda request_id: None,
        on_swap: Callable[[], None] = lambda: None,
        on_control: Callable[[engine_messages.AdminCommand], None] = lambda command: None,
        on_want: Callable[[bool], None] = lambda is_wanted: None,
        lending: Callable[[], LendingStatus | None] = lambda: None,
        steps: Callable[[], RecordedSteps | None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.link = link
        self.is_leaving = False
        self.closed = ""  # why no request is taken now
        self.source: engine_messages.Stage | None = None  # of the weights that run, if they were swapped in
        self._now_s = now_s
        self._on_add, self._on_gone, self._on_swap = on_add, on_gone, on_swap
        self._on_control, self._on_want, self._lending = on_control, on_want, lending
        self._steps = steps
        self._unstarted: set[str] = set()
        self._staged: tuple[engine_messages.Stage, Any] | None = None
        self._loader = WeightLoader(engine, link.wake)
        self._has_sent_facts = False

    def handle_commands(self, most_s: float = math.inf) -> None:
        """Carry out the commands that have arrived; after this long, leave the rest for the next call.

        Raises Closed without a front.
        """
        until_s = self._now_s() + most_s
        for command in self.link.receive():
            self._handle(command)
            if self._now_s() >= until_s:
                break
        outcome = self._loader.take()
        if outcome is not None:
            source, staged, error = outcome
            if error is None:
                self._staged = (source, staged)
            self._reply(source.tag, error)

    def run_step(self, plan: StepPlan) -> tuple[Sequence[TokenEvent], float, float]:
        """Run a step and send its events; return them, and when the step began and ended."""
        started: tuple[str, ...] = ()
        if self._unstarted:
            started = tuple(item.request_id for item in plan.items if item.request_id in self._unstarted)
            self._unstarted.difference_update(started)
        begin_s = self._now_s()
        events = self.engine.step(plan)
        end_s = self._now_s()
        self._send(events, plan.features.new_tokens, end_s - begin_s, started)
        return events, begin_s, end_s

    def send_evicted(self, events: Iterable[TokenEvent]) -> None:
        """Send the events of requests that ended without a step."""
        ended = tuple(events)
        for event in ended:
            self._unstarted.discard(event.request_id)
            self._on_gone(event.request_id)
        self._send(ended)

    def send_facts(self) -> None:
        """Send the facts before sleeping: commands without a step, such as a cancel, have changed them too."""
        if not self._has_sent_facts:
            self._send(())

    def send_lending_status(self) -> None:
        """Send the lending status without being asked: it has changed."""
        self.link.send(engine_messages.Reply(0, self.engine.facts(), lending=self._lending()))

    def _send(
        self, events: Sequence[TokenEvent], step_tokens: int = 0, step_s: float = 0.0, started: tuple[str, ...] = ()
    ) -> None:
        facts = self.engine.facts()
        small = tuple(event for event in events if not event.prompt_logprobs)
        self.link.send(Stepped(small, facts, step_tokens, step_s, started))
        for event in events:
            if event.prompt_logprobs:  # up to a megabyte: the front reads one at a time
                self.link.send(Stepped((event,), facts))
        self._has_sent_facts = True

    # Commands

    def _handle(self, command: engine_messages.Command) -> None:
        self._has_sent_facts = False
        match command:
            case engine_messages.Add():
                self._add(command.request)
            case engine_messages.CancelRequest():
                self._unstarted.discard(command.request_id)
                if self.engine.cancel(command.request_id):
                    self._on_gone(command.request_id)
                self._reply(command.tag)
            case engine_messages.EvictRequest():
                self._evict(command.request_id)
                self._reply(command.tag)
            case engine_messages.Stage() if self._loader.is_loading:
                error = RequestRefused("another version is being staged", hint="wait for it to finish")
                self._reply(command.tag, error)
            case engine_messages.Stage():
                self._loader.start(command)
            case engine_messages.Commit():
                self._commit(command)
            case engine_messages.GetFacts():
                self._reply(command.tag)
            case engine_messages.GetSteps():
                self.link.send(engine_messages.Reply(command.tag, self.engine.facts(), steps=self._steps()))
            case engine_messages.AdminCommand() | engine_messages.Want():
                try:
                    if isinstance(command, engine_messages.Want):
                        self._on_want(command.is_wanted)
                    else:
                        self._on_control(command)
                except RoseError as refusal:
                    self._reply(command.tag, refusal)
                else:
                    self._reply(command.tag)
            case engine_messages.Shutdown():
                self.is_leaving = True
            case engine_messages.StartEngine():
                raise AssertionError("started twice")

    def _add(self, request: Request) -> None:
        try:
            if self.closed:
                raise Unavailable(self.closed, hint="retry later, or elsewhere", retry_after_s=CLOSED_RETRY_S)
            self.engine.add(request)
        except (RequestRefused, Unavailable) as error:
            self.link.send(engine_messages.RequestRejected(request.request_id, fault_of(error)))
            return
        self._unstarted.add(request.request_id)
        self._on_add(request)

    def _evict(self, request_id: str) -> None:
        try:
            self.engine.evict(request_id)
        except KeyError:  # finished a moment ago
            return
        self.send_evicted([TokenEvent(request_id, (), (), self.engine.facts().version, "abort")])

    def _reply(self, tag: int, error: BaseException | None = None) -> None:
        if tag == 0:
            return
        fault = fault_of(error) if error is not None else None
        self.link.send(engine_messages.Reply(tag, self.engine.facts(), fault, self._lending()))

    def _commit(self, command: engine_messages.Commit) -> None:
        if self._staged is None or self._staged[0].version != command.version:
            held = f"`{self._staged[0].version}` is" if self._staged else "nothing is"
            self._reply(command.tag, RequestRefused(f"version `{command.version}` is not staged; {held}"))
            return
        self.engine.swap(self._staged[1])
        self.source, self._staged = self._staged[0], None
        self._on_swap()
        self._reply(command.tag)
