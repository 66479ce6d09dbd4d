"""An engine without arithmetic: real bookkeeping, made-up tokens, and time by a step profile.

`SimulatedEngine` batches, pages, caches, preempts, evicts and swaps with the scheduler of the embedded engine. A token
is a function of (seed, position in the sequence) only, so neither the batch, nor the place, nor the weights can change
it; a step takes no time, but says what it would have cost. Request lengths are forced with `ignore_eos`.

`SimulatedWorker` runs such an engine on a clock, as an executor runs a real one: commands that come while a step is
under way are obeyed when it ends, in the order they came. Under a virtual clock hours of traffic pass in seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from rose.clock import Clock
from rose.core.decisions import Grant
from rose.engines.base import Budget, EngineFacts, Partial, Request, StepPlan, TokenEvent, WorkerFacts
from rose.engines.blocks import BlockPool
from rose.engines.profiles import StepProfile
from rose.engines.scheduler import BatchScheduler, Limits, LiveRequest, Sampled
from rose.errors import ModelError, RequestRefused, RoseError, Unavailable

Answer = TypeVar("Answer")

VOCABULARY = 151_936  # of the large models that the profiles stand for
LOGPROB_MIN = -4.0  # about what sampling at temperature 1 shows; nothing depends on it


class SimulatedEngine:
    """A `StepEngine`. `last_step_s` is what the newest step would have taken. A `pool` may share pages with others."""

    def __init__(
        self,
        profile: StepProfile,
        *,
        version: str = "0",
        kv_blocks: int | None = None,
        pool: BlockPool | None = None,
        max_step_tokens: int = 512,
        max_sequences: int = 64,
        max_waiting: int = 1024,
        vocabulary: int = VOCABULARY,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.profile = profile
        self.max_step_tokens = max_step_tokens
        limits = Limits(
            block_tokens=profile.block_tokens,
            block_bytes=profile.block_bytes,
            max_context_tokens=profile.max_context_tokens,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            vocabulary=vocabulary,
            eos_token_ids=frozenset(eos_token_ids),
        )
        self.scheduler = BatchScheduler(limits, pool or BlockPool(kv_blocks or profile.kv_blocks), version)
        self.last_step_s = 0.0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(request_id)

    def evict(self, request_id: str) -> Partial:
        return self.scheduler.evict(request_id)

    def plan(self, budget: Budget) -> StepPlan | None:
        return self.scheduler.plan(Budget(min(budget.tokens, self.max_step_tokens), budget.sequences))

    def cost_s(self, plan: StepPlan) -> float:
        return self.profile.step_s(plan.features)

    def step(self, plan: StepPlan) -> Sequence[TokenEvent]:
        planned = self.scheduler.begin(plan)
        self.last_step_s = self.cost_s(plan)
        pairs = zip(planned, plan.items, strict=True)
        samples = {item.request_id: self._draw(live) for (live, _), item in pairs if item.samples}
        return self.scheduler.complete(plan, samples)

    def stage(self, version: str, source: Any) -> str:
        if not source:
            raise ModelError(f"there is no source for weights {version!r}", hint="name any folder; it is not read")
        return version

    def swap(self, staged: str) -> None:
        self.scheduler.swap(staged)

    def limit_kv(self, blocks: int) -> Sequence[TokenEvent]:
        return self.scheduler.limit_kv(blocks)

    def facts(self) -> EngineFacts:
        return self.scheduler.facts()

    def _draw(self, live: LiveRequest) -> Sampled:
        sampling = live.request.sampling
        chance = _mix(sampling.seed if sampling.temperature else 0, len(live.token_ids))
        vocabulary = self.scheduler.limits.vocabulary
        token_id, logprob = chance % vocabulary, LOGPROB_MIN * (chance >> 11) / (1 << 53)
        others = range(min(sampling.top_logprobs, vocabulary))
        return Sampled(token_id, logprob, tuple(((token_id + i) % vocabulary, logprob - i) for i in others))


def _mix(seed: int, position: int) -> int:
    """64 well-mixed bits of two numbers: the finaliser of splitmix64, by Steele, Lea and Flood."""
    bits = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) % (1 << 64)
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return bits ^ (bits >> 31)


class SimulatedWorker:
    """A `Worker`, made by `start` under the loop that runs its clock."""

    def __init__(self, engine: SimulatedEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._grant = Grant(0, 0, 0.0, "no grant yet")
        self._staged: str | None = None
        self._mailboxes: dict[str, asyncio.Queue[TokenEvent | RoseError | None]] = {}
        self._commands: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._awake = asyncio.Event()
        self._gone: Unavailable | None = None
        self._task = asyncio.create_task(self._run(), name="simulated worker")

    @classmethod
    async def start(cls, engine: SimulatedEngine, clock: Clock) -> SimulatedWorker:
        return cls(engine, clock)

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        request_id = request.request_id
        if request_id in self._mailboxes:
            raise RequestRefused(f"request id {request_id!r} is already in use")
        mailbox = self._mailboxes[request_id] = asyncio.Queue()
        try:
            await self._between_steps(lambda: self._engine.add(request))
            while (event := await mailbox.get()) is not None:
                if isinstance(event, RoseError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            if self._mailboxes.get(request_id) is mailbox:
                self._forget(request_id)

    async def evict(self, request_id: str) -> None:
        await self._between_steps(lambda: self._evict(request_id))

    async def cancel(self, request_id: str) -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            while not mailbox.empty():
                mailbox.get_nowait()
            mailbox.put_nowait(None)
            await self._forget(request_id)

    async def grant(self, tokens: int, sequences: int, until_s: float) -> None:
        await self._between_steps(lambda: self._set_grant(Grant(tokens, sequences, until_s)))

    async def kv_budget(self, budget_bytes: int) -> None:
        blocks = max(0, budget_bytes) // self._engine.profile.block_bytes
        await self._between_steps(lambda: self._deliver(self._engine.limit_kv(blocks)))

    async def stage(self, version: str, source: str) -> None:
        await self._between_steps(lambda: self._stage(version, source))

    async def commit(self, version: str) -> None:
        await self._between_steps(lambda: self._commit(version))

    async def facts(self) -> WorkerFacts:
        return await self._between_steps(
            lambda: WorkerFacts(self._engine.facts(), self._grant.is_open(self._clock.now_s()), self._staged)
        )

    async def close(self) -> None:
        await self.fail("the simulated worker was closed")

    async def fail(self, what: str) -> None:
        """Die as a process does: whoever waits gets `Unavailable`, now and later."""
        self._die(Unavailable(what, hint="start another worker"))
        self._task.cancel()
        await asyncio.wait([self._task])

    # The loop

    async def _run(self) -> None:
        try:
            while True:
                self._awake.clear()
                self._obey()
                plan = self._plan()
                if plan is None:
                    await self._awake.wait()
                else:
                    await self._clock.sleep_s(self._engine.cost_s(plan))
                    self._deliver(self._engine.step(plan))
        except Exception as error:
            self._die(Unavailable(f"the simulated engine failed: {type(error).__name__}: {error}"))
            raise

    def _plan(self) -> StepPlan | None:
        if not self._grant.is_open(self._clock.now_s()):
            return None
        return self._engine.plan(Budget(self._grant.tokens, self._grant.sequences))

    def _deliver(self, events: Iterable[TokenEvent]) -> None:
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is None:  # cancelled while the step ran
                continue
            mailbox.put_nowait(event)
            if event.finish_reason is not None:
                del self._mailboxes[event.request_id]

    def _die(self, error: Unavailable) -> None:
        self._gone = self._gone or error
        for mailbox in self._mailboxes.values():
            mailbox.put_nowait(error)
        for _, answer in self._commands:
            _refuse(answer, error)
        self._mailboxes.clear()
        self._commands.clear()

    # Commands

    def _between_steps(self, action: Callable[[], Answer]) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        if self._gone is not None:
            _refuse(answer, self._gone)
        else:
            self._commands.append((action, answer))
            self._awake.set()
        return answer

    def _obey(self) -> None:
        commands, self._commands = self._commands, []
        for action, answer in commands:
            try:
                result = action()
            except RoseError as error:
                _refuse(answer, error)
            else:
                if not answer.done():
                    answer.set_result(result)

    def _forget(self, request_id: str) -> asyncio.Future[bool]:
        del self._mailboxes[request_id]
        return self._between_steps(lambda: self._engine.cancel(request_id))

    def _evict(self, request_id: str) -> None:
        try:
            self._engine.evict(request_id)
        except KeyError:  # finished a moment ago
            return
        self._deliver([TokenEvent(request_id, (), (), self._engine.facts().version, "abort")])

    def _set_grant(self, grant: Grant) -> None:
        self._grant = grant

    def _stage(self, version: str, source: str) -> None:
        self._staged = self._engine.stage(version, source)

    def _commit(self, version: str) -> None:
        if self._staged != version:
            held = f"{self._staged!r} is" if self._staged else "nothing is"
            raise RequestRefused(f"version {version!r} is not staged; {held}", hint="stage it first")
        self._engine.swap(self._staged)
        self._staged = None


def _refuse(answer: asyncio.Future[Any], error: RoseError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # seen: a caller that did not wait for the answer must not be warned about it
