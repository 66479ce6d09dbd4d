"""What every `Worker` promises (engines/base.py), one story per promise."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator

import msgspec
import pytest
from tests.contract.kinds import CONTEXT_TOKENS, Output, ask
from tests.contract.workers import EmbeddedWorkers, SimulatedWorkers, WorkerKind

from rose.clock import Clock
from rose.engines.base import Request, TokenEvent, Worker
from rose.errors import ContextTooLong, ModelError, RequestRefused, Unavailable

FOREVER_S = 1e9
LONG = 400  # tokens; hardly ever done before the next command comes, and `caught` sees to the rest
_numbers = itertools.count()


@pytest.fixture(scope="module", params=["simulated", "embedded"])
def kind(request: pytest.FixtureRequest) -> Iterator[WorkerKind]:
    if request.param == "simulated":
        yield SimulatedWorkers()
        return
    workers = EmbeddedWorkers(*request.getfixturevalue("model_folders"))
    yield workers
    workers.close()


def new(prompt_tokens: int = 24, **settings: int) -> Request:
    """A request with an id of its own; the worker may have seen others."""
    return ask(f"request-{next(_numbers)}", prompt_tokens, **settings)


async def read(events: AsyncIterator[TokenEvent], output: Output, count: int | None = None) -> Output:
    """Take events until the last one, or so many."""
    while count is None or count > 0:
        try:
            output.take(await anext(events))
        except StopAsyncIteration:
            break
        count = None if count is None else count - 1
    return output


async def whole(worker: Worker, request: Request) -> Output:
    return await read(worker.generate(request), Output())


def started(worker: Worker, request: Request) -> asyncio.Task[Output]:
    return asyncio.create_task(whole(worker, request))


async def until(worker: Worker, clock: Clock, holds: Callable[[Worker], Awaitable[bool]]) -> None:
    while not await holds(worker):
        await clock.sleep_s(0.001)


async def one_is_here(worker: Worker) -> bool:
    facts = (await worker.facts()).engine
    return facts.running + facts.waiting > 0


async def none_is_here(worker: Worker) -> bool:
    facts = (await worker.facts()).engine
    return facts.running + facts.waiting == 0


async def open_gate(worker: Worker, clock: Clock) -> None:
    await worker.grant(512, 64, clock.now_s() + FOREVER_S)


async def caught(worker: Worker, clock: Clock, **settings: int) -> tuple[Request, AsyncGenerator[TokenEvent], Output]:
    """A request with ten tokens or more made, one of them read, others to come, and the gate closed behind it."""
    while True:
        await open_gate(worker, clock)
        before = (await worker.facts()).engine.generated_tokens
        request, output = new(**{"max_tokens": LONG, **settings}), Output()
        events = worker.generate(request)
        await read(events, output, 1)
        while (await worker.facts()).engine.generated_tokens < before + 10:
            await clock.sleep_s(0.001)
        await worker.grant(0, 0, 0.0)
        if await one_is_here(worker):
            return request, events, output
        await events.aclose()  # it was faster than we


# Generating


def test_events_come_in_order_and_end_with_a_reason(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        assert isinstance(worker, Worker)
        await open_gate(worker, clock)
        request = new(max_tokens=12)
        first, second = await whole(worker, request), await whole(worker, msgspec.structs.replace(request))
        assert (first.finish_reason, len(first.token_ids), len(first.logprobs)) == ("length", 12, 12)
        assert first.same_as(second)

    kind.tell(story)


def test_requests_together_say_what_they_say_alone(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        await open_gate(worker, clock)
        requests = [new(20 + 9 * seed, seed=seed, prompt=seed) for seed in range(6)]
        alone = [await whole(worker, request) for request in requests]
        together = await asyncio.gather(*(whole(worker, request) for request in requests))
        assert all(one.same_as(other) for one, other in zip(alone, together))

    kind.tell(story)


REFUSED: dict[str, tuple[type[RequestRefused], Callable[[], Request]]] = {
    "longer than the context": (ContextTooLong, lambda: new(max_tokens=CONTEXT_TOKENS)),
    "an id outside the vocabulary": (RequestRefused, lambda: Request("bad", (1_000_000,))),
    "an empty prompt": (RequestRefused, lambda: Request("empty", ())),
}


@pytest.mark.parametrize("error, make", REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_request_disturbs_nobody(
    kind: WorkerKind, error: type[RequestRefused], make: Callable[[], Request]
) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        await open_gate(worker, clock)
        other = started(worker, new(max_tokens=30))
        with pytest.raises(error):
            await whole(worker, make())
        assert len((await other).token_ids) == 30

    kind.tell(story)


def test_an_id_in_use_is_refused(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        request = new()
        first = started(worker, request)
        await until(worker, clock, one_is_here)
        with pytest.raises(RequestRefused):
            await whole(worker, request)
        await open_gate(worker, clock)
        assert (await first).finish_reason == "length"

    kind.tell(story)


# Leaving


def test_closing_the_iterator_cancels(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        await open_gate(worker, clock)
        events = worker.generate(new(max_tokens=LONG))
        await read(events, Output(), 2)
        await events.aclose()
        await until(worker, clock, none_is_here)
        assert (await worker.facts()).engine.kv_blocks_used == 0

    kind.tell(story)


def test_cancelling_the_reader_cancels(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        reader = started(worker, new(max_tokens=LONG))
        await until(worker, clock, one_is_here)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until(worker, clock, none_is_here)

    kind.tell(story)


def test_cancel_ends_the_iterator_without_another_event(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        request, events, output = await caught(worker, clock)
        await read(events, output, 1)  # and eight or more lie unread
        await worker.cancel(request.request_id)
        await read(events, output)
        assert (len(output.token_ids), output.finish_reason) == (2, None)
        await until(worker, clock, none_is_here)
        await worker.cancel("never heard of")

    kind.tell(story)


def test_evict_yields_everything_so_far_and_it_can_go_on(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        request, events, output = await caught(worker, clock)
        generated = (await worker.facts()).engine.generated_tokens
        await worker.evict(request.request_id)
        await read(events, output)
        assert output.finish_reason == "abort"
        await open_gate(worker, clock)
        later = await whole(worker, msgspec.structs.replace(request, partial=output.partial()))
        assert (await worker.facts()).engine.generated_tokens - generated == len(later.token_ids)
        assert output.then(later).same_as(await whole(worker, msgspec.structs.replace(request, request_id="reference")))
        await worker.evict("never heard of")

    kind.tell(story)


def test_evict_works_behind_a_closed_gate(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        request = new()
        reader = started(worker, request)
        await until(worker, clock, one_is_here)
        await worker.evict(request.request_id)
        output = await reader
        assert (output.finish_reason, output.token_ids) == ("abort", [])

    kind.tell(story)


# Grants


async def assert_standing_still(worker: Worker, clock: Clock) -> None:
    before = await worker.facts()
    await clock.sleep_s(0.05)
    after = await worker.facts()
    assert not before.gate_open
    assert not after.gate_open
    assert after.engine.steps == before.engine.steps


def test_the_gate_is_closed_at_first(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        reader = started(worker, new())
        await until(worker, clock, one_is_here)
        await assert_standing_still(worker, clock)
        await open_gate(worker, clock)
        assert (await worker.facts()).gate_open
        assert (await reader).finish_reason == "length"

    kind.tell_once(story)


@pytest.mark.parametrize("closing", [(0, 8), (8, 0)], ids=["no tokens", "no sequences"])
def test_a_closed_gate_stops_everything(kind: WorkerKind, closing: tuple[int, int]) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        request, events, output = await caught(worker, clock)
        await worker.grant(*closing, clock.now_s() + FOREVER_S)
        await assert_standing_still(worker, clock)
        await open_gate(worker, clock)
        assert len((await read(events, output)).token_ids) == LONG
        assert output.same_as(await whole(worker, request))

    kind.tell(story)


def test_an_expired_grant_is_a_closed_gate(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        _, events, output = await caught(worker, clock)
        await worker.grant(512, 64, clock.now_s() - 1.0)
        await assert_standing_still(worker, clock)
        await worker.grant(512, 64, clock.now_s() + 0.02)
        await clock.sleep_s(0.05)
        await assert_standing_still(worker, clock)
        await open_gate(worker, clock)
        assert len((await read(events, output)).token_ids) == LONG

    kind.tell(story)


def test_a_grant_bounds_every_step(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        readers = [started(worker, new(30, prompt=seed, max_tokens=5)) for seed in range(3)]
        while (await worker.facts()).engine.waiting < 3:
            await clock.sleep_s(0.001)
        before = (await worker.facts()).engine
        await worker.grant(7, 1, clock.now_s() + FOREVER_S)
        await asyncio.gather(*readers)
        after = (await worker.facts()).engine
        computed = after.prompt_tokens - before.prompt_tokens
        prompt_steps = -(-computed // 7)
        assert after.steps - before.steps >= prompt_steps + 3 * (5 - 1)

    kind.tell(story)


# Memory


def test_a_kv_budget_evicts_what_no_longer_fits(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        first, events, output = await caught(worker, clock, max_tokens=100)
        second = new(80, prompt=1, max_tokens=100)
        other = started(worker, second)
        while (await worker.facts()).engine.waiting < 1:
            await clock.sleep_s(0.001)
        facts = (await worker.facts()).engine
        await worker.kv_budget(9 * facts.block_bytes)  # enough for the first alone, never for the second
        assert (await other).finish_reason == "abort"
        await worker.kv_budget((facts.kv_blocks_used - 1) * facts.block_bytes)
        after = (await worker.facts()).engine
        assert after.kv_blocks_used == 0
        assert after.kv_blocks_limit == facts.kv_blocks_used - 1
        assert (await read(events, output)).finish_reason == "abort"
        await worker.kv_budget(1 << 30)
        await open_gate(worker, clock)
        later = await whole(worker, msgspec.structs.replace(first, partial=output.partial()))
        assert output.then(later).same_as(await whole(worker, first))
        assert (await whole(worker, second)).finish_reason == "length"

    kind.tell(story)


def test_no_kv_budget_evicts_everything_and_takes_nothing_for_now(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        readers = [started(worker, new(prompt=seed)) for seed in range(3)]
        while (await worker.facts()).engine.waiting < 3:
            await clock.sleep_s(0.001)
        await worker.kv_budget(0)
        assert {(await reader).finish_reason for reader in readers} == {"abort"}
        with pytest.raises(Unavailable):
            await whole(worker, new())
        facts = (await worker.facts()).engine
        assert facts.kv_blocks_limit == facts.kv_blocks_used == facts.kv_blocks_cached == 0

    kind.tell(story)


# Weights


def test_commit_swaps_between_two_tokens(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        old = (await worker.facts()).engine.version
        await worker.stage("next", kind.weights)
        facts = await worker.facts()
        assert (facts.engine.version, facts.staged_version) == (old, "next")
        request, events, output = await caught(worker, clock)
        await worker.commit("next")
        facts = await worker.facts()
        assert (facts.engine.version, facts.staged_version) == ("next", None)
        await open_gate(worker, clock)
        await read(events, output)
        (before, after) = output.partial().spans
        assert (before.version, before.start, after.version, after.end) == (old, 0, "next", LONG)
        assert before.end == after.start >= 10
        fresh = await whole(worker, request)
        assert (set(fresh.versions), fresh.cached_tokens) == ({"next"}, 0)

    kind.tell(story)


def test_a_failed_stage_changes_nothing(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        before = (await worker.facts()).engine.version
        await open_gate(worker, clock)
        reader = started(worker, new(max_tokens=40))
        await worker.stage("good", kind.weights)
        with pytest.raises(ModelError):
            await worker.stage("bad", kind.bad_weights)
        facts = await worker.facts()
        assert (facts.engine.version, facts.staged_version) == (before, "good")
        assert set((await reader).versions) == {before}
        with pytest.raises(RequestRefused):
            await worker.commit("bad")
        assert (await worker.facts()).engine.version == before
        await worker.commit("good")

    kind.tell(story)


# The end


def test_a_dead_engine_is_unavailable(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        _, events, output = await caught(worker, clock)
        await kind.kill(worker)
        with pytest.raises(Unavailable):
            await read(events, output)
        assert output.finish_reason is None
        for call in (worker.facts(), worker.grant(1, 1, FOREVER_S), worker.evict("a"), worker.stage("b", kind.weights)):
            with pytest.raises(Unavailable):
                await call
        with pytest.raises(Unavailable):
            await whole(worker, new())

    kind.tell_once(story)


def test_closing_ends_those_who_wait(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        reader = started(worker, new())
        await until(worker, clock, one_is_here)
        await worker.close()
        with pytest.raises(Unavailable):
            await reader
        with pytest.raises(Unavailable):
            await worker.facts()

    kind.tell_once(story)


def test_counters_follow_the_work(kind: WorkerKind) -> None:
    async def story(worker: Worker, clock: Clock) -> None:
        await open_gate(worker, clock)
        before = (await worker.facts()).engine
        await whole(worker, new(24, prompt=1000, max_tokens=12))
        after = (await worker.facts()).engine
        assert after.prompt_tokens - before.prompt_tokens == 24
        assert after.generated_tokens - before.generated_tokens == 12
        assert after.steps - before.steps == 12
        assert after.running == after.waiting == 0

    kind.tell(story)
