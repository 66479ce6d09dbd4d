"""An engine for tests of code that uses an `EngineClient`: a step engine in the test's own event loop.

Any `StepEngine` fits; with a `SimulatedEngine` batching, paging and eviction are real, and tokens depend only on the
seed and the position. It passes the contract suite of `EngineClient`, like the engines that it stands for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from rose.engines.base import (
    Budget,
    EngineEvents,
    EngineFacts,
    LendingStatus,
    Request,
    StepEngine,
    Stepped,
    TokenEvent,
)
from rose.engines.token_stream import SinkTable, TokenSink
from rose.errors import RequestRefused, RoseError, Unavailable


class FakeEngine:
    """An `EngineClient`, made under the loop that steps it: a step every `step_s`, with the time of `step_cost_s`.

    A test sets `trouble` to refuse requests, calls `deliver` to make an engine say what it would not, and `die` to
    lose the engine's requests as a killed process does.
    """

    def __init__(
        self, engine: StepEngine, step_s: float = 0.0, *, step_cost_s: Callable[[Any], float] | None = None
    ) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.events = EngineEvents()
        self.trouble: Unavailable | None = None
        self.lending_status: LendingStatus | None = None
        self._engine, self._step_s, self._step_cost_s = engine, step_s, step_cost_s
        self._sinks = SinkTable()
        self._staged: tuple[str, Any] | None = None
        self._has_work = asyncio.Event()
        self._stepping = asyncio.create_task(self._step_forever(), name="fake engine")

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts()

    @property
    def requests(self) -> int:
        """Return how many requests have not ended."""
        return len(self._sinks)

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        self._check()
        self._sinks.add(requests, sink)
        for request in requests:
            try:
                self._engine.add(request)
            except RoseError as error:
                self._sinks.fail(request.request_id, error)
        self._has_work.set()

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in list(request_ids):
            self._sinks.remove(request_id)
            self._engine.cancel(request_id)

    async def evict(self, request_id: str) -> None:
        self._check()
        with suppress(KeyError):  # it has ended
            self._engine.evict(request_id)
            self.deliver([TokenEvent(request_id, (), (), self.facts.version, "abort")])

    async def stage(self, version: str, folder: str) -> None:
        self._check()
        self._staged = version, self._engine.stage(version, folder)

    async def commit(self, version: str) -> None:
        self._check()
        if self._staged is None or self._staged[0] != version:
            raise RequestRefused(f"version `{version}` is not staged", hint="stage it first")
        self._engine.swap(self._staged[1])
        self._staged = None

    async def set_wanted(self, is_wanted: bool) -> None:
        self._check()

    async def query(self) -> EngineFacts:
        self._check()
        return self.facts

    async def close(self) -> None:
        self.die("the device is shutting down")
        self.trouble = Unavailable("the device is shutting down")
        self._stepping.cancel()
        await asyncio.wait([self._stepping])

    # For tests

    def die(self, why: str) -> None:
        """Fail every request, as when the engine process is killed and started again."""
        for request_id in self._sinks:
            self._engine.cancel(request_id)
        self._sinks.fail_all(Unavailable(why))

    def deliver(self, events: Sequence[TokenEvent], tokens: int = 0, seconds: float = 0.0) -> None:
        """Hand events to their sinks and publish them as one step."""
        for event in events:
            self.cancel(self._sinks.deliver(event))
        self.events.steps.publish(Stepped(tuple(events), self.facts, tokens, seconds))

    async def _step_forever(self) -> None:
        try:
            while True:
                plan = self._engine.plan(Budget(512, 64))
                if plan is None:
                    self._has_work.clear()
                    await self._has_work.wait()
                    continue
                step_s = self._step_cost_s(plan) if self._step_cost_s is not None else 0.0
                if step_s:
                    await asyncio.sleep(step_s)
                    plan = self._engine.plan(Budget(512, 64))  # requests may have come or gone meanwhile
                    if plan is None:
                        continue
                self.deliver(self._engine.step(plan), plan.features.new_tokens, step_s)
                await asyncio.sleep(self._step_s)
        except Exception as error:
            self.trouble = Unavailable(f"the fake engine failed: {type(error).__name__}: {error}")
            self.die(self.trouble.what)
            raise

    def _check(self) -> None:
        if self.trouble is not None:
            raise self.trouble
