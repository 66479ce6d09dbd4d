"""Turns go on whatever happens to the engine, and waiting for a state ends with the engine's own reason."""

from __future__ import annotations

import asyncio

import pytest

from rose.engines.base import TokenEvent
from rose.errors import Unavailable
from rose.verify.rollout_side import RolloutSide
from rose.vllm.control_segment import Status


class FakeClient:
    """An engine client that answers every request with two tokens, or is down."""

    def __init__(self) -> None:
        self.submitted, self.cancelled, self.is_down = [], [], False
        self.status: Status | None = Status(1, why="serving has work")
        self.trouble: Unavailable | None = None

    def submit(self, requests, stream):
        if self.is_down:
            raise Unavailable("the rollout engine is gone")
        self.submitted += requests
        for request in requests:
            stream.put(TokenEvent(request.request_id, (7,), (0.0,), ""))
            last = TokenEvent(request.request_id, (8,), (0.0,), "", "length")
            asyncio.get_running_loop().call_later(0.001, stream.put, last)

    def cancel(self, names):
        self.cancelled += names


@pytest.fixture
def side():
    return RolloutSide(FakeClient())  # type: ignore[arg-type]


def test_an_answer_is_all_tokens_to_its_end(side):
    assert asyncio.run(side.answer([1, 2], 2)) == [7, 8]
    [request] = side.client.submitted
    assert (request.prompt_ids, request.sampling.temperature) == ((1, 2), 0.0)


def test_every_turn_is_followed_by_another_also_after_the_engine_was_gone(side):
    async def story():
        side.client.is_down = True
        async with side.turning(2, prompt_tokens=30, tokens=5):
            await asyncio.sleep(0.05)
            assert side.client.submitted == []
            side.client.is_down = False
            async with asyncio.timeout(20):
                while len(side.client.submitted) < 10:
                    await asyncio.sleep(0.01)

    asyncio.run(story())
    assert {len(request.prompt_ids) for request in side.client.submitted} == {30}
    assert len({request.request_id for request in side.client.submitted}) == len(side.client.submitted)


def test_a_state_that_does_not_come_is_told_with_the_engines_reason(side):
    with pytest.raises(Unavailable, match=r"a step did not come within .* s: serving has work"):
        asyncio.run(side.until(lambda status: status.steps > 0, 0.05, "a step"))


def test_without_an_engine_its_trouble_is_the_reason(side):
    side.client.status, side.client.trouble = None, Unavailable("the rollout engine is starting")
    with pytest.raises(Unavailable, match="is starting"):
        _ = side.status
    with pytest.raises(Unavailable, match="is starting"):
        asyncio.run(side.until(lambda status: True, 0.05, "an engine"))


def test_a_state_that_is_there_takes_no_time(side):
    assert asyncio.run(side.until(lambda status: status.process_id == 1, 1.0, "x")) < 1.0
