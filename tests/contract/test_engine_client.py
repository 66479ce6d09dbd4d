"""What every `EngineClient` promises (engines/base.py), one story per promise."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.contract.engine_clients import ClientKind, FakeClients, PoolClients, ProcessClients, SimulatedClients
from tests.contract.kinds import CONTEXT_TOKENS, Output, ask

from rose.engines.base import EngineClient, Request, Stepped, TokenEvent
from rose.engines.token_stream import TokenStream
from rose.errors import ContextTooLong, ModelError, RequestRefused, Unavailable

LONG = 400  # tokens; still running when the next command comes
_numbers = itertools.count()


@pytest.fixture(scope="module", params=["fake", "simulated", "embedded", "lent", "pool"])
def kind(request: pytest.FixtureRequest) -> Iterator[ClientKind]:
    folders = request.getfixturevalue("model_folders")
    kinds: dict[str, Callable[[], ClientKind]] = {
        "fake": FakeClients,
        "simulated": SimulatedClients,
        "embedded": lambda: ProcessClients(*folders, is_lent=False),
        "lent": lambda: ProcessClients(*folders, is_lent=True),
        "pool": lambda: PoolClients(folders[0]),
    }
    found = kinds[request.param]()
    yield found
    found.close()


def new(prompt_tokens: int = 24, **settings: Any) -> Request:
    """A request with an id of its own; the engine may have seen others."""
    return ask(f"request-{next(_numbers)}", prompt_tokens, **settings)


async def read(stream: TokenStream, output: Output, tokens: int | None = None) -> Output:
    """Take events until the last one, or until there are so many tokens."""
    while output.finish_reason is None and (tokens is None or len(output.token_ids) < tokens):
        for event in await stream.take():
            output.take(event)
    return output


def submitted(client: EngineClient, *requests: Request) -> TokenStream:
    stream = TokenStream()
    client.submit(requests, stream)
    return stream


async def whole(client: EngineClient, request: Request) -> Output:
    return await read(submitted(client, request), Output())


async def until_idle(client: EngineClient) -> None:
    facts = await client.query()
    while facts.running + facts.waiting:
        await asyncio.sleep(0.001)
        facts = await client.query()


def needs_own_engine(kind: ClientKind) -> None:
    if kind.is_pool:
        pytest.skip("steps, weights and deaths are those of the pool's workers")


# Generating


def test_events_come_in_order_and_end_with_a_reason(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        assert isinstance(client, EngineClient)
        request = new(max_tokens=12)
        first = await whole(client, request)
        second = await whole(client, msgspec.structs.replace(request, request_id=f"{request.request_id}-again"))
        assert (first.finish_reason, len(first.token_ids), len(first.logprobs)) == ("length", 12, 12)
        assert first.same_as(second)

    kind.tell(story)


def test_requests_together_get_what_they_get_alone(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        requests = [new(20 + 9 * seed, seed=seed, prompt=seed) for seed in range(6)]
        alone = [await whole(client, request) for request in requests]
        renamed = [msgspec.structs.replace(request, request_id=f"{request.request_id}-b") for request in requests]
        together = await asyncio.gather(*(whole(client, request) for request in renamed))
        assert all(one.same_as(other) for one, other in zip(alone, together, strict=True))

    kind.tell(story)


def test_the_log_probabilities_of_a_prompt_come_once_with_its_first_token(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        async def scored(request: Request) -> list[float]:
            stream, events = submitted(client, request), list[TokenEvent]()
            while not events or events[-1].finish_reason is None:
                events += await stream.take()
            first, *others = [event for event in events if event.token_ids]
            assert not any(event.prompt_logprobs for event in others)
            assert all(len(best) == 2 and rank >= 1 for _, rank, best in first.prompt_logprobs)
            return [logprob for logprob, _, _ in first.prompt_logprobs]

        request = new(30, max_tokens=4, prompt_logprobs=2)
        found = await scored(request)
        again = await scored(msgspec.structs.replace(request, request_id=f"{request.request_id}-again"))
        assert len(found) == 29 and found == pytest.approx(again, abs=1e-3)

    kind.tell(story)


def test_one_sink_may_take_several_requests(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        requests = [new(seed=seed) for seed in range(3)]
        stream, ended = submitted(client, *requests), set[str]()
        while len(ended) < 3:
            ended |= {event.request_id for event in await stream.take(ends=1) if event.finish_reason == "length"}
        assert ended == {request.request_id for request in requests}

    kind.tell(story)


REFUSED: dict[str, tuple[type[RequestRefused], Callable[[], Request]]] = {
    "longer than the context": (ContextTooLong, lambda: new(max_tokens=10 * CONTEXT_TOKENS)),
    "an id outside the vocabulary": (RequestRefused, lambda: Request(f"bad-{next(_numbers)}", (1_000_000,))),
    "an empty prompt": (RequestRefused, lambda: Request(f"empty-{next(_numbers)}", ())),
}


@pytest.mark.parametrize("error, make", REFUSED.values(), ids=REFUSED.keys())
def test_a_refused_request_disturbs_no_other(
    kind: ClientKind, error: type[RequestRefused], make: Callable[[], Request]
) -> None:
    async def story(client: EngineClient) -> None:
        other = submitted(client, new(max_tokens=30))
        with pytest.raises(error):
            await whole(client, make())
        assert len((await read(other, Output())).token_ids) == 30

    kind.tell(story)


def test_an_id_in_use_is_refused(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        request = new(max_tokens=LONG)
        first = submitted(client, request)
        with pytest.raises(RequestRefused):
            submitted(client, request)
        assert (await read(first, Output())).finish_reason == "length"

    kind.tell(story)


# Leaving


def test_a_cancelled_request_delivers_nothing_more(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        request, output = new(max_tokens=LONG), Output()
        stream = submitted(client, request)
        await read(stream, output, 2)
        client.cancel([request.request_id, "never heard of"])
        pending = asyncio.create_task(stream.take())
        assert len((await whole(client, new(max_tokens=30))).token_ids) == 30
        await until_idle(client)
        assert not pending.done() or all(event.finish_reason is None for event in pending.result())
        pending.cancel()

    kind.tell(story)


def test_a_reader_that_does_not_read_loses_its_requests_alone(kind: ClientKind) -> None:
    needs_own_engine(kind)

    async def story(client: EngineClient) -> None:
        slow, other = TokenStream(tokens_max=5), new(max_tokens=60)
        client.submit([new(max_tokens=LONG), new(max_tokens=LONG)], slow)
        assert len((await whole(client, other)).token_ids) == 60
        await slow.take()  # what came before it was too much
        with pytest.raises(Unavailable, match="too slow"):
            await slow.take()
        await until_idle(client)

    kind.tell(story)


def test_an_evicted_request_has_all_its_tokens_and_can_go_on(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        request, output = new(max_tokens=LONG), Output()
        stream = submitted(client, request)
        await read(stream, output, 2)
        await client.evict(request.request_id)
        await client.evict("never heard of")
        await read(stream, output)
        if kind.is_pool:
            assert (output.finish_reason, len(output.token_ids)) == ("length", LONG), "it goes on by itself"
            return
        assert output.finish_reason == "abort" and 2 <= len(output.token_ids) < LONG
        rest = msgspec.structs.replace(request, request_id=f"{request.request_id}-rest", partial=output.partial())
        reference = msgspec.structs.replace(request, request_id=f"{request.request_id}-reference")
        assert output.then(await whole(client, rest)).same_as(await whole(client, reference))

    kind.tell(story)


# Weights


def test_commit_swaps_between_two_tokens(kind: ClientKind) -> None:
    needs_own_engine(kind)

    async def story(client: EngineClient) -> None:
        old = client.facts.version
        request, output = new(max_tokens=LONG), Output()
        stream = submitted(client, request)
        await read(stream, output, 2)
        await client.stage("next", kind.weights)
        assert client.facts.version == old
        await client.commit("next")
        assert client.facts.version == "next"
        await read(stream, output)
        assert set(output.versions) <= {old, "next"} and output.versions == sorted(output.versions, key="next".__eq__)
        fresh = await whole(client, msgspec.structs.replace(request, request_id=f"{request.request_id}-fresh"))
        assert (set(fresh.versions), fresh.cached_tokens) == ({"next"}, 0)

    kind.tell(story)


def test_a_failed_stage_changes_nothing(kind: ClientKind) -> None:
    if kind.bad_weights is None:
        pytest.skip("no folder is read")
    bad_weights = kind.bad_weights

    async def story(client: EngineClient) -> None:
        before = client.facts.version
        await client.stage("good", kind.weights)
        with pytest.raises(ModelError):
            await client.stage("bad", bad_weights)
        with pytest.raises(RequestRefused):
            await client.commit("bad")
        assert set((await whole(client, new(max_tokens=40))).versions) == {before}
        await client.commit("good")
        assert client.facts.version == "good"

    kind.tell(story)


def test_weights_that_were_not_staged_are_refused(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        with pytest.raises(RequestRefused):
            await client.commit("never staged")

    kind.tell(story)


# Events


def test_every_subscriber_follows_every_step_until_it_leaves(kind: ClientKind) -> None:
    needs_own_engine(kind)

    async def story(client: EngineClient) -> None:
        seen: list[list[Stepped]] = [[], []]
        leave = [client.events.steps.subscribe(steps.append) for steps in seen]
        request = new(max_tokens=12)
        output = await whole(client, request)
        own = [[e for step in steps for e in step.events if e.request_id == request.request_id] for steps in seen]
        assert own[0] == own[1]
        assert [token for event in own[0] for token in event.token_ids] == output.token_ids
        leave[0]()
        count = len(seen[0])
        await whole(client, new(max_tokens=12))
        assert len(seen[0]) == count < len(seen[1])
        leave[1]()

    kind.tell(story)


def test_whether_there_is_work_may_be_told_to_any_engine(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        for is_wanted in (False, True):
            await client.set_wanted(is_wanted)
        async with asyncio.timeout(60):
            while client.lending_status is not None and client.lending_status.model != "resident":
                await client.query()
        assert (await whole(client, new())).finish_reason == "length"

    kind.tell(story)


def test_counters_follow_the_work(kind: ClientKind) -> None:
    async def story(client: EngineClient) -> None:
        before = await client.query()
        await whole(client, new(24, prompt=1000, max_tokens=12))
        await until_idle(client)
        after = await client.query()
        assert after.generated_tokens - before.generated_tokens == 12
        if not kind.is_pool:
            steps = after.steps - before.steps
            assert after.prompt_tokens - before.prompt_tokens == 24
            assert steps == 12 or (kind.splits_prompts and 12 < steps < 12 + 24)

    kind.tell(story)


# The end


def test_a_dead_engine_is_unavailable(kind: ClientKind) -> None:
    needs_own_engine(kind)

    async def story(client: EngineClient) -> None:
        stream, output = submitted(client, new(max_tokens=LONG)), Output()
        await read(stream, output, 2)
        kind.kill(client)
        with pytest.raises(Unavailable):
            await read(stream, output)
        assert output.finish_reason is None
        while client.trouble is None:
            await asyncio.sleep(0.001)
        with pytest.raises(Unavailable):
            submitted(client, new())
        for call in (client.query(), client.evict("a"), client.stage("b", kind.weights), client.set_wanted(True)):
            with pytest.raises(Unavailable):
                await call

    kind.tell_once(story)


def test_closing_ends_what_is_under_way(kind: ClientKind) -> None:
    needs_own_engine(kind)

    async def story(client: EngineClient) -> None:
        stream = submitted(client, new(max_tokens=LONG))
        await client.close()
        with pytest.raises(Unavailable):
            await read(stream, Output())
        with pytest.raises(Unavailable):
            submitted(client, new())
        with pytest.raises(Unavailable):
            await client.query()

    kind.tell_once(story)
