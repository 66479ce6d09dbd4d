"""Streams keep events in order and bounded, and the table of sinks loses and doubles none."""

from __future__ import annotations

import asyncio

import pytest
from tests.in_loop import in_loop

from rose.engines.base import Request, TokenEvent
from rose.engines.token_stream import PATIENT_TOKENS, SinkTable, TokenStream
from rose.errors import RequestRefused, Unavailable


def event(request_id: str = "a", *token_ids: int, ends: bool = False) -> TokenEvent:
    return TokenEvent(request_id, token_ids or (1,), (0.0,) * (len(token_ids) or 1), "0", "stop" if ends else None)


async def taking(stream: TokenStream, ends: int = 0) -> asyncio.Task[list[TokenEvent]]:
    task = asyncio.create_task(stream.take(ends=ends))
    await asyncio.sleep(0)
    return task


@in_loop
async def test_a_reader_gets_all_events_since_its_last_call_in_order() -> None:
    stream = TokenStream()
    events = [event("a", 1), event("b", 2), event("a", 3, ends=True)]
    reader = await taking(stream)
    for each in events:
        stream.put(each)
    assert await reader == events
    assert not (await taking(stream)).done(), "nothing is left"


@in_loop
async def test_an_error_comes_after_earlier_events_and_the_first_one_stays() -> None:
    stream = TokenStream()
    stream.put(event())
    stream.fail(Unavailable("first"))
    stream.fail(Unavailable("second"))
    assert await stream.take() == [event()]
    for _ in range(2):
        with pytest.raises(Unavailable, match="first"):
            await stream.take()


@in_loop
async def test_a_reader_of_ends_sleeps_until_so_many_requests_have_ended() -> None:
    stream = TokenStream()
    reader = await taking(stream, ends=2)
    for each in (event("a"), event("a", ends=True), event("b")):
        stream.put(each)
        await asyncio.sleep(0)
        assert not reader.done()
    stream.put(event("b", ends=True))
    assert len(await reader) == 4


@in_loop
async def test_much_that_is_unread_wakes_even_a_reader_of_ends() -> None:
    stream = TokenStream()
    reader = await taking(stream, ends=1)
    stream.put(event("a", *range(PATIENT_TOKENS)))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(event("a"))
    assert len(await reader) == 2


@in_loop
async def test_a_stream_is_full_until_it_is_read() -> None:
    stream = TokenStream(tokens_max=3)
    stream.put(event("a", 1, 2, 3))
    assert not stream.is_full
    stream.put(TokenEvent("a", (4,), (0.0,), "0", None, (((5, -1.0), (6, -2.0)),)))
    assert stream.is_full, "alternatives count too"
    await stream.take()
    assert not stream.is_full


def table_of(*names: str, stream: TokenStream) -> SinkTable:
    table = SinkTable()
    table.add([Request(name, (1,)) for name in names], stream)
    return table


def test_an_id_in_use_is_refused_and_nothing_is_entered() -> None:
    table = table_of("a", stream=TokenStream())
    with pytest.raises(RequestRefused, match="`a` is already in use"):
        table.add([Request("b", (1,)), Request("a", (1,))], TokenStream())
    assert list(table) == ["a"] and "b" not in table and len(table) == 1
    assert table.remove("a") and not table.remove("a")


@in_loop
async def test_a_request_leaves_the_table_with_its_last_event() -> None:
    stream = TokenStream()
    table = table_of("a", "b", stream=stream)
    assert not list(table.deliver(event("a"))) and "a" in table
    assert not list(table.deliver(event("a", ends=True))) and "a" not in table
    assert not list(table.deliver(event("a"))), "events of a request that is gone are dropped"
    assert len(await stream.take()) == 2 and list(table) == ["b"]


@in_loop
async def test_a_full_sink_fails_and_all_its_requests_are_to_be_cancelled() -> None:
    slow, other = TokenStream(tokens_max=1), TokenStream()
    table = table_of("a", "b", stream=slow)
    table.add([Request("c", (1,))], other)
    assert not list(table.deliver(event("a")))
    assert sorted(table.deliver(event("b"))) == ["a", "b"]
    await slow.take()
    with pytest.raises(Unavailable, match="too slow"):
        await slow.take()


@in_loop
async def test_errors_end_one_request_or_each_sink_once() -> None:
    failures: list[str] = []

    class Sink(TokenStream):
        def fail(self, error: Exception) -> None:  # type: ignore[override]
            failures.append(str(error))

    table = table_of("a", "b", stream=Sink())
    table.fail("a", Unavailable("one"))
    table.fail("a", Unavailable("it is gone"))
    table.add([Request("c", (1,))], Sink())
    table.fail_all(Unavailable("all"))
    assert failures == ["one", "all", "all"] and len(table) == 0
