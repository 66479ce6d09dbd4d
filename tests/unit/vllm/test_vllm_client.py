"""Requests, streams and errors of a rollout engine's HTTP server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rose.engines.base import Partial, Request, Sampling
from rose.errors import ContextTooLong, RequestRefused, Unavailable
from rose.vllm import vllm_client


def test_a_continued_turn_requests_only_the_remaining_tokens() -> None:
    sampling = Sampling(max_tokens=10, min_tokens=4, seed=3, top_k=0, stop_token_ids=(5,))
    request = Request("a", (1, 2), sampling, priority=2, partial=Partial((7, 8, 9), (0.0,) * 3))
    body = vllm_client.body_of(request, salt="x")
    params = body["sampling_params"]
    assert body["token_ids"] == [1, 2, 7, 8, 9]
    assert (params["max_tokens"], params["min_tokens"], params["stop_token_ids"]) == (7, 1, [5])
    assert params["seed"] != vllm_client.body_of(Request("a", (1, 2), sampling), salt="")["sampling_params"]["seed"]
    assert (body["cache_salt"], body["priority"]) == ("x", 2)
    assert "cache_salt" not in vllm_client.body_of(request, salt="")


SCORED = Request("a", (1, 2, 3), Sampling(max_tokens=10, min_tokens=4, seed=3, prompt_logprobs=2))


def test_the_request_that_scores_a_prompt_samples_one_token_and_does_not_stream() -> None:
    body = vllm_client.scoring_body_of(SCORED, salt="x")
    assert (body["request_id"], body["token_ids"], body["stream"]) == ("a-prompt", [1, 2, 3], False)
    params = body["sampling_params"]
    assert (params["max_tokens"], params["prompt_logprobs"], body["cache_salt"]) == (1, 2, "x")
    assert "min_tokens" not in params and "seed" not in params
    assert "prompt_logprobs" not in vllm_client.body_of(SCORED, salt="")["sampling_params"]


def scores_of(**message: Any) -> Any:
    return vllm_client.prompt_logprobs(json.dumps({"choices": [], **message}).encode(), SCORED)


def entry(logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": "x"}


def test_log_probabilities_of_a_prompt_are_its_own_token_and_the_best_by_rank() -> None:
    second = {"2": entry(-3.0, 7), "9": entry(-0.25, 1), "8": entry(-0.5, 2)}
    third = {"3": entry(-0.25, 1), "8": entry(-0.5, 2)}
    assert scores_of(prompt_logprobs=[None, second, third]) == (
        (-3.0, 7, ((9, -0.25), (8, -0.5))),
        (-0.25, 1, ((3, -0.25), (8, -0.5))),
    )


@pytest.mark.parametrize(
    "places",
    [None, [], [None, {"2": entry(-1.0, 1)}], [None, {"2": entry(-1.0, 1)}, None], [None, {"5": entry(-1.0, 1)}] * 2],
)
def test_a_prompt_that_was_not_scored_is_unavailable(places: Any) -> None:
    with pytest.raises(Unavailable, match="no log-probabilities of the prompt"):
        scores_of(prompt_logprobs=places)


def test_a_scoring_request_that_was_aborted_has_no_scores() -> None:
    assert scores_of(choices=[{"token_ids": [], "finish_reason": "abort"}]) is None


class FakeReply:
    """As much of aiohttp's response as is read."""

    def __init__(self, *messages: Any, status: int = 200) -> None:
        self.lines = [b"data: " + json.dumps(message).encode() + b"\n" for message in messages]
        self.status = status

    @property
    def content(self) -> Any:
        async def lines() -> Any:
            for line in [*self.lines, b"\n", b"data: [DONE]\n"]:
                yield line

        return lines()

    async def text(self) -> str:
        return self.lines[0].decode().removeprefix("data: ")


def read(*messages: Any) -> list[vllm_client.Chunk]:
    async def story() -> list[vllm_client.Chunk]:
        return [chunk async for chunk in vllm_client.chunks(FakeReply(*messages))]  # type: ignore[arg-type]

    return asyncio.run(story())


def test_a_stream_becomes_chunks() -> None:
    content = [{"token_id": 7, "logprob": -0.5, "top_logprobs": [{"token_id": 7, "logprob": -0.5}]}]
    first = {"choices": [{"token_ids": [7], "logprobs": {"content": content}, "finish_reason": None}]}
    last = {"choices": [{"token_ids": [], "logprobs": None, "finish_reason": "abort"}]}
    assert read(first, last) == [
        vllm_client.Chunk((7,), (-0.5,), (((7, -0.5),),), None),
        vllm_client.Chunk((), (), (), "abort"),
    ]


@pytest.mark.parametrize(
    "message, words",
    [
        ({"error": {"message": "boom"}}, "boom"),
        ({"choices": [{"token_ids": [], "finish_reason": "error"}]}, "error"),
    ],
)
def test_a_stream_that_fails_is_unavailable(message: Any, words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        read(message)


@pytest.mark.parametrize(
    "status, body, kind",
    [
        (400, {"error": {"message": "maximum context length is 5"}}, ContextTooLong),
        (400, {"error": {"message": "no"}}, RequestRefused),
        (422, {"detail": "what"}, RequestRefused),
        (500, {"error": {"message": "boom"}}, Unavailable),
    ],
)
def test_refused_requests_become_roses_errors(status: int, body: Any, kind: type[Exception]) -> None:
    error = asyncio.run(vllm_client.refusal(FakeReply(body, status=status)))  # type: ignore[arg-type]
    assert type(error) is kind
