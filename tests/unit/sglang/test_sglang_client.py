"""Requests, streams and errors of SGLang's HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.vllm.test_vllm_client import FakeReply

from rose.engines.base import Partial, Request, Sampling
from rose.errors import ContextTooLong, RequestRefused, Unavailable
from rose.sglang.sglang_client import SglangChunk, generate_body, sglang_chunks


def test_a_continued_turn_asks_for_the_remaining_tokens_only() -> None:
    sampling = Sampling(max_tokens=10, min_tokens=4, seed=3, top_k=0, stop_token_ids=(5,))
    request = Request("a", (1, 2), sampling, tenant="x", priority=2, partial=Partial((7, 8, 9), (0.0,) * 3))
    body = generate_body(request, "rose-1")
    params = body["sampling_params"]
    assert (body["input_ids"], body["rid"], body["extra_key"], body["priority"]) == ([1, 2, 7, 8, 9], "rose-1", "x", 2)
    assert (params["max_new_tokens"], params["min_new_tokens"], params["stop_token_ids"]) == (7, 1, [5])
    assert (params["top_k"], "sampling_seed" in params) == (-1, False)
    assert "extra_key" not in generate_body(Request("a", (1,)), "b")


def message(count: int, *ids: int, reason: str | None = None, **facts: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": "x",
        "completion_tokens": count,
        "output_token_logprobs": [[-0.5 * token, token, None] for token in ids],
        "finish_reason": {"type": reason, "message": "why"} if reason else None,
        **facts,
    }
    return {"output_ids": list(ids), "meta_info": meta}


def read(*messages: Any) -> list[SglangChunk]:
    async def story() -> list[SglangChunk]:
        return [chunk async for chunk in sglang_chunks(FakeReply(*messages))]  # type: ignore[arg-type]

    return asyncio.run(story())


def test_a_stream_is_read_token_by_token() -> None:
    tops = [[[-0.5, 3, None], [-2.0, 4, None]]]
    first, last = read(
        message(1, 3, cached_tokens=16, output_top_logprobs=tops), message(3, 4, 5, reason="length", cached_tokens=16)
    )
    assert (first.chunk.token_ids, first.chunk.logprobs, first.cached_tokens) == ((3,), (-1.5,), 16)
    assert first.chunk.top_logprobs == (((3, -0.5), (4, -2.0)),)
    assert (last.chunk.token_ids, last.chunk.logprobs, last.chunk.finish_reason) == ((4, 5), (-2.0, -2.5), "length")


def test_a_token_that_an_abort_repeats_is_not_taken_twice() -> None:
    chunks = read(message(2, 3, 4), message(2, 4, reason="abort"))
    assert [one.chunk.token_ids for one in chunks] == [(3, 4), ()]
    assert [one.chunk.logprobs for one in chunks] == [(-1.5, -2.0), ()]
    assert chunks[-1].chunk.finish_reason == "abort"


def test_a_stream_that_leaves_out_tokens_is_an_error() -> None:
    with pytest.raises(Unavailable, match="left out 1 tokens"):
        read(message(1, 3), message(3, 5))


@pytest.mark.parametrize(
    "message, error",
    [
        ({"error": {"message": "over the context length", "type": "invalid_request_error"}}, ContextTooLong),
        ({"error": {"message": "no", "type": "invalid_request_error"}}, RequestRefused),
        ({"error": {"message": "no", "type": "server_error"}}, Unavailable),
        (message(1, 3, reason="strange"), Unavailable),
    ],
)
def test_errors_in_a_stream_are_errors_of_ours(message: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        read(message)
