"""Response bodies keep OpenAI's fields, and leave out what was not asked for."""

from __future__ import annotations

import msgspec

from rose.openai.response_schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    Delta,
    GenerateLogprob,
    GenerateTopLogprob,
    PlacementInfo,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)


def test_fields_that_were_not_asked_for_are_left_out() -> None:
    usage = Usage(1, 2, 3, PromptTokensDetails(0))
    choice = ChatChoice(index=0, message=AssistantMessage(content="x"), finish_reason="stop")
    body = msgspec.to_builtins(ChatCompletion(id="i", created=1, model="m", choices=[choice], usage=usage))
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    assert list(body["choices"][0]) == ["index", "message", "logprobs", "finish_reason", "stop_reason"]
    assert list(body["choices"][0]["message"]) == ["role", "content", "refusal"]


def test_an_empty_delta_is_an_empty_object() -> None:
    assert msgspec.json.encode(Delta()) == b"{}"
    assert msgspec.json.encode(Delta(content="x")) == b'{"content":"x"}'
    chunk = msgspec.to_builtins(ChatChunk(id="i", created=1, model="m", choices=[]))
    assert "usage" not in chunk and chunk["object"] == "chat.completion.chunk"


def test_the_order_of_fields_is_that_of_openai() -> None:
    best = TopLogprob("a", -1.0, [97])
    assert list(msgspec.to_builtins(TokenLogprob("a", -1.0, [97], [best]))) == [
        "token",
        "logprob",
        "bytes",
        "top_logprobs",
    ]
    tokens = GenerateLogprob("token_id:1", 1, -1.0, [GenerateTopLogprob("token_id:1", 1, -1.0)])
    assert list(msgspec.to_builtins(tokens)) == ["token", "token_id", "logprob", "top_logprobs"]


def test_a_placement_names_the_trajectory_only_if_there_is_one() -> None:
    assert msgspec.json.encode(PlacementInfo(["w"])) == b'{"workers":["w"]}'
    assert msgspec.to_builtins(PlacementInfo([], "t", 0, False)) == {
        "workers": [], "trajectory": "t", "turn": 0, "is_fork": False,
    }  # fmt: skip
