"""Clients of a simulated gateway repeat a request until it is answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rose.clock import VirtualClock, run_virtual
from rose.errors import QueueFull, RequestRefused, Unavailable
from rose.sim.invariant_checker import EventLog
from rose.sim.network import ClientLine, NetworkFaults
from rose.sim.players import Client


class Host:
    """Answers with the outcomes of a list, in order; None never answers."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.requests = list(outcomes), 0

    def work(self, do: Callable[[], Awaitable[Any]]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.requests += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        elif outcome is not None:
            answer.set_result(outcome)
        return answer


def insist(host: Host, network: NetworkFaults | None = None) -> tuple[Any, float]:
    """Return the answer of one insisting client, and the virtual time that it took."""

    async def live() -> tuple[Any, float]:
        loop = asyncio.get_running_loop()
        line = ClientLine(host, network or NetworkFaults(), random.Random(1))
        client = Client("c", line, random.Random(2), EventLog(loop.time))

        async def request() -> str:
            return "unused"

        return await client.insist(request, timeout_s=4.0), loop.time()

    return run_virtual(live(), VirtualClock())


def test_an_answer_takes_one_request() -> None:
    host = Host("answer")
    answer, took_s = insist(host)
    assert (answer, host.requests) == ("answer", 1) and took_s < 0.1


def test_a_request_is_repeated_after_errors_and_silence() -> None:
    host = Host(Unavailable("down", retry_after_s=2.0), QueueFull("full"), ConnectionResetError(), None, "answer")
    answer, took_s = insist(host)
    assert (answer, host.requests) == ("answer", 5) and took_s > 1.0 + 4.0


def test_a_refusal_is_final() -> None:
    host = Host(RequestRefused("no"))
    with pytest.raises(RequestRefused):
        insist(host)
    assert host.requests == 1


def test_lost_and_duplicated_requests_reach_the_gateway_as_often_as_they_should() -> None:
    network = NetworkFaults()
    network.doubled = 1.0
    twice = Host("first", "second")
    assert insist(twice, network)[0] == "second" and twice.requests == 2
    network.clear()
    network.lost_replies = 0.5
    lossy = Host(*["answer"] * 50)
    answer, _ = insist(lossy, network)
    assert answer == "answer" and lossy.requests >= 1
