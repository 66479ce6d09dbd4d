"""The rollout model on a serving device: whether it is loaded, its memory, and the server of its rollout front.

`core.lending_state` names three states: resident, parked (its weights, without a page or a request) and absent. The
gateway may have it parked while there is no work, and activated again; a stop by the operator goes before that. Leaving
is quick, between two steps: every request ends with "abort" and keeps its tokens, every page goes to serving. Weights
are read by a thread, while serving goes on. A failure on the rollout side makes the model leave for good. On a CPU the
host's memory is the device's, so parking frees KV memory only.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol

from rose.api.faults import Fault, fault_of
from rose.core.lending_state import RESTART, Residency, Stop, StopCause
from rose.device import engine_messages
from rose.device.engine_server import EngineServer, WeightLoader
from rose.device.step_arbiter import ScheduledEngine, StepArbiter
from rose.device.tenancy import SharedMemory
from rose.device.transport import EngineLink
from rose.engines.base import LendingStatus, TokenEvent
from rose.errors import RequestRefused

UNWANTED = "parked: there is no work for it"
LOADING = "the rollout model is being loaded"


class UnloadableEngine(ScheduledEngine, Protocol):
    """A step engine whose weights can be released."""

    @property
    def weights_bytes(self) -> int: ...

    def release_weights(self) -> None:
        """Forget the weights; nothing may be planned until `swap` brings some."""


class RolloutResidency:
    """The rollout model of one lent device. All but the reading of weights happens between two steps."""

    def __init__(
        self,
        arbiter: StepArbiter,
        engine: UnloadableEngine,
        memory: SharedMemory | None,
        *,
        folder: str,
        now_s: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.arbiter, self.engine, self.memory = arbiter, engine, memory
        self.server: EngineServer | None = None  # of the rollout front, if one is connected
        self.state: Residency = "resident"
        self.is_wanted = True  # by the gateway
        self.status: Callable[[], LendingStatus | None] = lambda: None
        self.failure = ""  # why it will not come back
        self.closed = ""  # why it takes no requests
        self.evictions = self.evicted_tokens = 0
        self.activation_s: float | None = None
        self.parking_s: float | None = None
        self._source = engine_messages.Stage(engine.facts().version, folder)
        self._now_s = now_s
        self._loader = WeightLoader(engine, wake)
        self._next_state: Literal["parked", "absent"] | None = None  # of a model that is to leave once it is loaded
        self._activated_s = 0.0
        self._take_memory()

    @property
    def is_resident(self) -> bool:
        return self.state == "resident" and not self.failure

    @property
    def is_loading(self) -> bool:
        return self._loader.is_loading

    # The rollout front

    def attach(self, link: EngineLink) -> None:
        """Serve the rollout front that has connected."""
        if self.failure:
            link.send(engine_messages.EngineFailed(Fault("Unavailable", self.failure)))
            link.close()
            return
        self.server = EngineServer(
            self.engine,
            link,
            now_s=self._now_s,
            on_swap=self._on_swap,
            on_want=self.set_wanted,
            lending=lambda: self.status(),
        )
        self.server.closed = self.closed
        link.send(engine_messages.Ready(self.engine.facts()))
        self.set_wanted(True)  # until the gateway says otherwise
        self.report()

    def detach(self) -> None:
        """End the requests of a rollout front that is gone. The model stays."""
        assert self.server is not None
        self.server.link.close()
        self.server = None
        if self.is_resident:
            self._end_requests()

    def report(self) -> None:
        """Send the lending status to the rollout front."""
        if self.server is not None:
            self.server.send_lending_status()

    def report_if_blocked(self) -> None:
        """Report that admission has become blocked. The next step shows that it is open again."""
        if self.arbiter.stalls.newly_blocked(self._now_s()):
            self.report()

    def on_evicted(self, events: Sequence[TokenEvent]) -> None:
        self.evictions += len(events)
        if self.server is not None and events:
            self.server.send_evicted(events)

    # Activating and leaving

    def set_wanted(self, is_wanted: bool) -> None:
        """Activate the model, or park it until there is work. Raises RequestRefused if it will not come back."""
        self.is_wanted = is_wanted
        if self.arbiter.stopped or self.is_loading:
            self.report()
        elif is_wanted and not self.is_resident:
            self.activate()
        elif not is_wanted and self.is_resident:
            self.leave("parked", UNWANTED)

    def leave(self, state: Literal["parked", "absent"], why: str) -> None:
        """Give up requests, pages and, if it is to be absent, weights; a model that is loading leaves after that."""
        begin_s = self._now_s()
        self.refuse_requests(why)
        if self.is_loading:
            self._next_state = "absent" if self._next_state == "absent" else state
            self.report()
            return
        if self.is_resident:
            self.on_evicted(self._end_requests())
            if self.memory is not None:
                self.memory.remove_rollouts()
        if state == "absent":
            self.engine.release_weights()
        if self.state != "absent":
            self.state = state
        self.parking_s = self._now_s() - begin_s
        self.report()

    def activate(self) -> None:
        """Make the model resident if there is work: at once from parked, after loading from absent.

        Raises RequestRefused if it will not come back.
        """
        if self.failure:
            raise RequestRefused(self.failure, hint=RESTART)
        if self.is_loading:
            self._next_state = None
            self.refuse_requests(LOADING)
        elif not self.is_wanted:
            if self.is_resident:
                self.leave("parked", UNWANTED)
            else:
                self.refuse_requests(UNWANTED)
                self.report()
        else:
            self._activated_s = self._now_s()
            if self.state == "absent":
                self.refuse_requests(LOADING)
                self._loader.start(self._source)
            else:
                self._become_resident()

    def finish_loading(self) -> None:
        """Take the weights that were read, or report why they could not be; called between two steps."""
        outcome = self._loader.take()
        if outcome is None:
            return
        source, staged, error = outcome
        if self._next_state == "absent" or self.failure:
            self.report()
        elif source != self._source:
            self._loader.start(self._source)  # newer ones have come, and what was read may be gone from its folder
            return
        elif error is not None:
            self.refuse_requests(f"the rollout model could not be loaded: {error}")
            self.report()
        else:
            self.engine.swap(staged)
            if self._next_state is not None:
                self.state = "parked"
                self.report()
            else:
                self._become_resident()
                if not self.is_wanted and not self.arbiter.stopped:
                    self.leave("parked", UNWANTED)
        self._next_state = None

    def fail(self, error: Exception) -> None:
        """Remove the model for good, since its own code failed. Raises nothing."""
        self.failure = f"the rollout model was removed after a failure: {type(error).__name__}: {error}"
        self.refuse_requests(self.failure)
        self.arbiter.stop(Stop(StopCause.FAILURE, self.failure))
        self.state = "absent"
        server, self.server = self.server, None
        _try(partial(traceback.print_exception, error))
        _try(partial(self.engine.limit_kv, 0))
        if self.memory is not None:
            _try(self.memory.remove_rollouts)
        _try(self.engine.release_weights)
        if server is not None:
            _try(partial(server.link.send, engine_messages.EngineFailed(fault_of(error))))
            _try(server.link.close)

    def refuse_requests(self, why: str) -> None:
        """Refuse requests for this reason; an empty one admits them again."""
        self.closed = why
        if self.server is not None:
            self.server.closed = why

    def _end_requests(self) -> Sequence[TokenEvent]:
        limit = self.engine.scheduler.pool.limit
        self.evicted_tokens += sum(live.computed for live in self.engine.scheduler.running)
        events = self.engine.limit_kv(0)
        self.engine.limit_kv(limit)
        return events

    def _take_memory(self) -> None:
        if self.memory is not None:
            self.memory.inflation, self.memory.burst_blocks = self.arbiter.inflation, self.arbiter.burst_blocks
            self.memory.policy.restart()
            self.memory.lend_to(self.engine.scheduler, self.on_evicted)
            self.memory.observe()

    def _become_resident(self) -> None:
        if self.state != "resident":
            self.state = "resident"
            self._take_memory()
            self.activation_s = self._now_s() - self._activated_s
        self.refuse_requests("")
        self.report()

    def _on_swap(self) -> None:
        """Note new weights; those that come while the model is absent are not kept in memory."""
        assert self.server is not None and self.server.source is not None
        self._source = self.server.source
        if self.memory is not None:
            self.memory.weights_swapped = True
        if self.state == "absent":
            self.engine.release_weights()


def _try(clean_up: Callable[[], object]) -> None:
    """Clean up by code that may be what failed: whatever it raises, the rest is cleaned up too."""
    try:
        clean_up()
    except Exception as error:
        with suppress(OSError):  # standard error may be closed
            traceback.print_exception(error)
