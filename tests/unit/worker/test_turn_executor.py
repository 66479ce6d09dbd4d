"""A device's agent outlives whatever a gateway or its own engine does: it logs, and dials again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.rollout_world import LoopEngine

from rose.api.worker_messages import PIECES_MAX, TokensAdded, Turn, TurnRefused
from rose.engines.base import Request, Sampling, TokenEvent
from rose.worker.turn_executor import TurnExecutor

NAN = float("nan")


def in_a_runner(story: Callable[[TurnExecutor, LoopEngine, list[Any]], None]) -> None:
    async def whole() -> None:
        engine, said = LoopEngine(step_s=10, waiting_max=1 << 20), []
        runner = TurnExecutor(engine, said.append)
        story(runner, engine, said)
        runner.close()
        await engine.close()

    asyncio.run(whole())


def turn(attempt_id: int) -> Turn:
    return Turn(attempt_id, Request(f"turn-{attempt_id}", (1, 2), Sampling(max_tokens=4)))


@pytest.mark.parametrize("logprob", [NAN, float("-inf"), float("inf"), 5.0])
def test_a_turn_with_an_invalid_log_probability_is_refused_alone(logprob: float) -> None:
    def story(runner: TurnExecutor, engine: LoopEngine, said: list[Any]) -> None:
        for attempt_id in (1, 2):
            runner.start(turn(attempt_id))
        events = (TokenEvent("turn-1", (5,), (logprob,), "v7"), TokenEvent("turn-2", (6,), (-1.0,), "v7", "stop"))
        engine.deliver(events)
        [refused] = [message for message in said if isinstance(message, TurnRefused)]
        assert refused.attempt_id == 1 and refused.fault.kind == "RequestRefused" and "diverged" in refused.fault.what
        [tokens] = [message for message in said if isinstance(message, TokensAdded)]
        assert [piece.attempt_id for piece in tokens.pieces] == [2] and runner.running == 0

    in_a_runner(story)


@pytest.mark.parametrize("scores", [((NAN, 1, ()),), ((-1.0, 1, ((3, float("-inf")),)),)], ids=["own", "best"])
def test_a_turn_with_an_invalid_log_probability_of_its_prompt_is_refused(scores: Any) -> None:
    def story(runner: TurnExecutor, engine: LoopEngine, said: list[Any]) -> None:
        runner.start(turn(1))
        engine.deliver((TokenEvent("turn-1", (5,), (-1.0,), "v7", prompt_logprobs=scores),))
        [refused] = [message for message in said if isinstance(message, TurnRefused)]
        assert "diverged" in refused.fault.what and runner.running == 0

    in_a_runner(story)


def test_many_turns_are_sent_in_messages_of_bounded_size() -> None:
    def story(runner: TurnExecutor, engine: LoopEngine, said: list[Any]) -> None:
        attempt_ids = range(2 * PIECES_MAX + 5)
        for attempt_id in attempt_ids:
            runner.start(turn(attempt_id))
        events = tuple(TokenEvent(f"turn-{attempt_id}", (5,), (-1.0,), "v0", "stop") for attempt_id in attempt_ids)
        engine.deliver(events)
        assert [len(message.pieces) for message in said] == [PIECES_MAX, PIECES_MAX, 5]

    in_a_runner(story)


def test_log_probabilities_of_prompts_are_sent_one_by_one() -> None:
    def story(runner: TurnExecutor, engine: LoopEngine, said: list[Any]) -> None:
        for attempt_id in (1, 2, 3):
            runner.start(turn(attempt_id))
        scores = ((-1.0, 1, ()),)
        engine.deliver(
            [
                TokenEvent("turn-1", (5,), (-1.0,), "v0", prompt_logprobs=scores),
                TokenEvent("turn-2", (5,), (-1.0,), "v0", "stop", prompt_logprobs=scores),
                TokenEvent("turn-3", (5,), (-1.0,), "v0", "stop"),
                TokenEvent("turn-1", (6,), (-1.0,), "v1"),
            ]
        )
        runner.flush()
        sent = [[(piece.attempt_id, piece.prompt_logprobs) for piece in message.pieces] for message in said]
        assert sorted(sent[:2]) == [[(1, scores)], [(2, scores)]]
        assert [pair for message in sent[2:] for pair in message] == [(3, ()), (1, ())]

    in_a_runner(story)
