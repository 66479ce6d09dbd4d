"""The rollout model as a guest on a serving device: who speaks for it, where its weights and its memory are.

*resident*  weights and KV pages; it runs when it is let.
*parked*    weights, but no page and no request: nothing of serving's memory is taken. Back at once.
*absent*    nothing. Back after its weights were read again, by a thread, while serving goes on.

Whom it works for may park it while there is no work, and call it back; what the owner holds back stays so whatever they
say: new weights for a model that is absent are noted and not kept, and one that is told to leave while its weights are
read goes where it was told once they are there. Leaving is quick, between two steps: every request is ended with
"abort" and keeps its tokens, every page goes to serving. An exception on the guest's side makes it leave for good, with
the reason kept for the owner. On a CPU the host's memory is the device's, so parking frees KV memory only; on a GPU
the weights would move to the host.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Protocol

from rose.coserve import messages
from rose.coserve.device import stand_back
from rose.coserve.lending import Lender, ScheduledEngine
from rose.coserve.link import EngineLink
from rose.coserve.port import Port
from rose.coserve.tenancy import SharedMemory
from rose.engines.base import Budget, TokenEvent
from rose.errors import RequestRefused

Place = Literal["resident", "parked", "absent"]
UNWANTED = "parked: there is no work for it"
LOADING = "the rollout model is being loaded"


class GuestEngine(ScheduledEngine, Protocol):
    """A step engine whose weights can leave."""

    @property
    def weights_bytes(self) -> int: ...

    def release_weights(self) -> None:
        """Forget the weights; nothing may be planned until `swap` brings some."""


class Guest:
    """One per lent device. All but the reading of weights happens between two steps."""

    def __init__(
        self,
        lender: Lender,
        engine: GuestEngine,
        memory: SharedMemory | None,
        *,
        folder: str,
        budget: Budget,
        now_s: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.lender, self.engine, self.memory = lender, engine, memory
        self.port: Port | None = None
        self.place: Place = "resident"
        self.is_wanted = True  # by those whom it works for
        self.status: Callable[[], messages.LendingStatus | None] = lambda: None
        self.failure = ""  # why it will not come back
        self.closed = ""  # why it takes no requests
        self.evictions = self.evicted_tokens = 0
        self.activation_s: float | None = None
        self.parking_s: float | None = None
        self._source = messages.Stage(engine.facts().version, folder)
        self._budget, self._now_s, self._wake = budget, now_s, wake
        self._loading: threading.Thread | None = None
        self._loaded: tuple[messages.Stage, Any, BaseException | None] | None = None
        self._called_off: Literal["parked", "absent"] | None = None  # told to leave before it was here
        self._called_s = 0.0
        self._take_memory()

    @property
    def is_here(self) -> bool:
        return self.place == "resident" and not self.failure

    @property
    def is_coming(self) -> bool:
        return self._loading is not None

    # Who speaks for it

    def attach(self, link: EngineLink) -> None:
        """A rollout front has come."""
        if self.failure:
            link.send(messages.Failed(messages.Fault("Unavailable", self.failure)))
            link.close()
            return
        self.port = Port(
            self.engine,
            link,
            self._budget,
            now_s=self._now_s,
            on_swap=self._swapped,
            on_want=self.want,
            lending=lambda: self.status(),
        )
        self.port.closed = self.closed
        link.send(messages.Ready(self.engine.facts()))
        self.want(True)  # until somebody says otherwise
        self.tell()

    def detach(self) -> None:
        """The rollout front is gone, and nobody waits for its requests any more. The model stays."""
        assert self.port is not None
        self.port.link.close()
        self.port = None
        if self.is_here:
            self._end_requests()

    # Coming and going

    def check(self) -> None:
        """Raises RequestRefused if it will not come back."""
        if self.failure:
            raise RequestRefused(self.failure, hint="restart the device to lend it again")

    def want(self, is_wanted: bool) -> None:
        """Be here, or be parked until there is work. Raises RequestRefused if it will not come back."""
        self.is_wanted = is_wanted
        if self.lender.stopped or self.is_coming:
            self.tell()
        elif is_wanted and not self.is_here:
            self.call_back()
        elif not is_wanted and self.is_here:
            self.leave("parked", UNWANTED)

    def leave(self, place: Literal["parked", "absent"], why: str) -> None:
        """Out now: requests, pages and, if it is to be absent, weights."""
        begin_s = self._now_s()
        self.close(why)
        if self.is_coming:
            self._called_off = "absent" if self._called_off == "absent" else place
            self.tell()
            return
        if self.is_here:
            self.evicted(self._end_requests())
            if self.memory is not None:
                self.memory.remove_rollouts()
        if place == "absent":
            self.engine.release_weights()
        if self.place != "absent":
            self.place = place
        self.parking_s = self._now_s() - begin_s
        self.tell()

    def call_back(self) -> None:
        """Be resident again, if there is work: at once from parked, after loading from absent."""
        self.check()
        if self.is_coming:
            self._called_off = None
            self.close(LOADING)
            return
        if not self.is_wanted:
            self._stay_away()
            return
        self._called_s = self._now_s()
        if self.place == "absent":
            self.close(LOADING)
            self._read_weights()
        else:
            self._settle_in()

    def finish_loading(self) -> None:
        """When the loop comes by: take the weights that were read, or say why they could not be."""
        if self._loaded is None or self._loading is None:
            return
        (source, staged, error), self._loaded = self._loaded, None
        self._loading.join()
        self._loading = None
        if self._called_off == "absent" or self.failure:
            self.tell()
        elif source != self._source:
            self._read_weights()  # newer ones have come, and what was read may be gone from its folder
            return
        elif error is not None:
            self.close(f"the rollout model could not be loaded: {error}")
            self.tell()
        else:
            self.engine.swap(staged)
            self._arrive()
        self._called_off = None

    def fail(self, error: Exception) -> None:
        """Its own code failed: it leaves for good, with a word to whoever listens. Raises nothing."""
        self.failure = f"the rollout model was removed after a failure: {type(error).__name__}: {error}"
        self.close(self.failure)
        self.lender.stop(self.failure)
        self.lender.dry_run = None
        self.place = "absent"
        port, self.port = self.port, None
        _try(partial(traceback.print_exception, error))
        _try(partial(self.engine.limit_kv, 0))
        if self.memory is not None:
            _try(self.memory.remove_rollouts)
        _try(self.engine.release_weights)
        if port is not None:
            _try(partial(port.link.send, messages.Failed(messages.fault_of(error))))
            _try(port.link.close)

    # Requests

    def close(self, why: str) -> None:
        """Take no more requests until `open`."""
        self.closed = why
        if self.port is not None:
            self.port.closed = why

    def open(self) -> None:
        self.close("")

    def tell(self) -> None:
        """Whoever speaks for it, how lending stands."""
        if self.port is not None:
            self.port.tell_lending()

    def notice_gate(self) -> None:
        """Between two steps: serving may have shut it out. That it is let in again shows by itself."""
        if self.lender.gate.has_shut(self._now_s()):
            self.tell()

    def evicted(self, events: Sequence[TokenEvent]) -> None:
        self.evictions += len(events)
        if self.port is not None and events:
            self.port.send_evicted(events)

    # Inside

    def _end_requests(self) -> Sequence[TokenEvent]:
        limit = self.engine.scheduler.pool.limit
        self.evicted_tokens += sum(live.computed for live in self.engine.scheduler.running)
        events = self.engine.limit_kv(0)
        self.engine.limit_kv(limit)
        return events

    def _take_memory(self) -> None:
        if self.memory is not None:
            self.memory.stretch = self.lender.stretch
            self.memory.policy.restart()
            self.memory.lend_to(self.engine.scheduler, self.evicted)
            self.memory.observe()

    def _arrive(self) -> None:
        if self._called_off is not None:
            self.place = "parked"
            self.tell()
            return
        self._settle_in()
        if not self.is_wanted and not self.lender.stopped:
            self.leave("parked", UNWANTED)

    def _settle_in(self) -> None:
        if self.place != "resident":
            self.place = "resident"
            self._take_memory()
            self.activation_s = self._now_s() - self._called_s
        self.open()
        self.tell()

    def _stay_away(self) -> None:
        """The owner would lend it, and there is no work."""
        if self.is_here:
            self.leave("parked", UNWANTED)
        else:
            self.close(UNWANTED)
            self.tell()

    def _read_weights(self) -> None:
        self._loading = threading.Thread(target=self._load, args=(self._source,), name="activate", daemon=True)
        self._loading.start()

    def _load(self, source: messages.Stage) -> None:
        stand_back()
        try:
            self._loaded = (source, self.engine.stage(source.version, source.folder), None)
        except Exception as error:
            self._loaded = (source, None, error)
        self._wake()

    def _swapped(self) -> None:
        assert self.port is not None and self.port.source is not None
        self._source = self.port.source
        if self.memory is not None:
            self.memory.weights_swapped = True
        if self.place == "absent":
            self.engine.release_weights()


def _try(clean_up: Callable[[], object]) -> None:
    """After a failure, by code that may be what failed: whatever it raises, the rest is cleaned up too."""
    try:
        clean_up()
    except Exception as error:
        with suppress(OSError):  # nobody reads what is printed
            traceback.print_exception(error)
