"""A device's agent outlives whatever a gateway or its own engine does: it logs, and dials again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.unit.rollout_world import LoopEngine, eventually

from rose.coserve.mailbox import Mailbox
from rose.coserve.messages import Stepped
from rose.engines.base import Request, Sampling, TokenEvent
from rose.rollout.agent import AgentSettings, run_agent
from rose.rollout.messages import CONNECT_PATH, PIECES_MAX, Evict, Refused, Tokens, Turn, Welcome
from rose.rollout.runner import TurnRunner

NAN = float("nan")


async def gateway_that_says(frame: bytes, joined: list[str]) -> tuple[web.AppRunner, str]:
    """Welcomes every agent, then says this."""

    async def connect(request: web.Request) -> web.StreamResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.receive()
        joined.append("one more")
        await connection.send_bytes(msgspec.msgpack.encode([Welcome(0.1)]))
        await connection.send_bytes(frame)
        await connection.receive()
        while not connection.closed:
            await connection.receive()
        return connection

    app = web.Application()
    app.router.add_get(CONNECT_PATH, connect)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.mark.parametrize("frame", [
    b"\x91\x82\xa4type\xa5Leave\xa3why\xa1\xff",
    b"\x91" * 100_000,
    b"nonsense",
    msgspec.msgpack.encode([Evict(3)]),
], ids=["utf-8", "deep", "nonsense", "an errand that fails"])  # fmt: skip
def test_an_agent_dials_again_whatever_a_gateway_says(
    frame: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(runner: TurnRunner, ticket: int) -> None:
        raise ZeroDivisionError("an error that was not foreseen")

    monkeypatch.setattr(TurnRunner, "evict", fail)
    caplog.set_level(logging.ERROR)

    async def story() -> None:
        joined: list[str] = []
        runner, url = await gateway_that_says(frame, joined)
        engine = LoopEngine()
        agent = asyncio.create_task(run_agent(engine, AgentSettings(url, "token", "model", "dedicated", 4, "a")))
        await eventually(lambda: len(joined) >= 3)
        assert not agent.done()
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        await engine.close()
        await runner.cleanup()

    asyncio.run(story())
    assert bool(caplog.records) == (frame == msgspec.msgpack.encode([Evict(3)])), "only what was not foreseen"


def in_a_runner(story: Callable[[TurnRunner, LoopEngine, list[Any]], None]) -> None:
    async def whole() -> None:
        engine, said = LoopEngine(step_s=10), []
        runner = TurnRunner(engine, said.append)
        story(runner, engine, said)
        runner.close()
        await engine.close()

    asyncio.run(whole())


def turn(ticket: int) -> Turn:
    return Turn(ticket, Request(f"turn-{ticket}", (1, 2), Sampling(max_tokens=4)))


@pytest.mark.parametrize("logprob", [NAN, float("-inf"), float("inf"), 5.0])
def test_a_turn_whose_log_probability_is_no_number_is_refused_and_the_others_go_on(logprob: float) -> None:
    def story(runner: TurnRunner, engine: LoopEngine, said: list[Any]) -> None:
        for ticket in (1, 2):
            runner.start(turn(ticket))
        events = (TokenEvent("turn-1", (5,), (logprob,), "v7"), TokenEvent("turn-2", (6,), (-1.0,), "v7", "stop"))
        engine.on_step(Stepped(events, engine.facts))
        [refused] = [message for message in said if isinstance(message, Refused)]
        assert refused.ticket == 1 and refused.fault.kind == "RequestRefused" and "diverged" in refused.fault.what
        [tokens] = [message for message in said if isinstance(message, Tokens)]
        assert [piece.ticket for piece in tokens.pieces] == [2] and runner.running == 0

    in_a_runner(story)


def test_a_worker_with_many_turns_sends_them_in_messages_that_the_gateway_takes() -> None:
    def story(runner: TurnRunner, engine: LoopEngine, said: list[Any]) -> None:
        engine.submit = lambda requests: Mailbox()  # type: ignore[method-assign]  # more than its queue would take
        tickets = range(2 * PIECES_MAX + 5)
        for ticket in tickets:
            runner.start(turn(ticket))
        events = tuple(TokenEvent(f"turn-{ticket}", (5,), (-1.0,), "v0", "stop") for ticket in tickets)
        engine.on_step(Stepped(events, engine.facts))
        assert [len(message.pieces) for message in said] == [PIECES_MAX, PIECES_MAX, 5]

    in_a_runner(story)
