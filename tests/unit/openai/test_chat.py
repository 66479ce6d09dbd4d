"""`POST /v1/chat/completions`: whole responses, streams, tool calls and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.front_world import FrontWorld, run_with_server, stream_of

from rose.api.requests import Request, TokenEvent
from rose.models.model_folder import ModelFolder
from rose.openai.chat import ChatRenderer
from rose.openai.generation import Choice, ChoiceText
from rose.openai.request_schemas import ChatBody, ChatMessage, Function, Tool

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
CALL = '<tool_call>{"name": "look", "arguments": {"where": "north"}}</tool_call>'


def test_a_conversation_gets_one_message_per_choice(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        status, answer = await world.post(CHAT, {"messages": USER, "n": 2, "max_tokens": 3, "return_token_ids": True})
        assert status == 200 and answer["object"] == "chat.completion"
        for index, choice in enumerate(answer["choices"]):
            assert choice["index"] == index and choice["finish_reason"] == "length"
            assert choice["message"]["content"] == "aaa" and choice["token_ids"] == [97] * 3
            assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 3}]
        assert answer["prompt_token_ids"] == list(world.engine.requests[0].prompt_ids)
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
        assert answer["rose"] == {"workers": ["w"]}

    run_with_server(folder, story)


def test_a_stream_opens_with_the_role_and_ends_with_the_usage(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        body = {"messages": USER, "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
        first, *middle, last = await stream_of(world, CHAT, body)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in middle) == "aa"
        assert middle[-1]["choices"][0]["finish_reason"] == "length" and middle[-1]["usage"] is None
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2

    run_with_server(folder, story)


def test_without_a_limit_an_answer_may_fill_the_context(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        for body, tokens in (({}, None), ({"max_tokens": 5}, 5), ({"max_tokens": 5, "max_completion_tokens": 4}, 4)):
            await world.post(CHAT, {"messages": USER, "stop": "b"} | body)
            request = world.engine.requests[-1]
            assert request.sampling.max_tokens == (tokens or 256 - len(request.prompt_ids))

    run_with_server(folder, story, context_tokens=256)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"model": "another"}, "model"),
    ],
)
def test_bodies_that_contradict_themselves_are_refused(folder: ModelFolder, body: dict[str, Any], param: str) -> None:
    async def story(world: FrontWorld) -> None:
        status, answer = await world.post(CHAT, {"messages": USER} | body)
        assert status == (404 if param == "model" else 400) and answer["error"]["param"] == param
        assert not world.engine.requests

    run_with_server(folder, story)


def test_a_tool_call_is_the_same_in_a_stream_and_in_a_whole_answer(folder: ModelFolder) -> None:
    tools = [Tool(Function("look"))]
    body = ChatBody(messages=[ChatMessage("user", "x")], tools=tools, return_token_ids=True)

    async def story(world: FrontWorld) -> None:
        renderer = ChatRenderer(world.front, body, "chatcmpl-1", calls_key="turn-1")
        choice = Choice(0, Request("r", (1,)), ChoiceText(world.front.tokenizer.stream()))
        ids = world.front.tokenizer.encode("Look: " + CALL, False)
        for position, token_id in enumerate(ids):
            reason: Any = "length" if position == len(ids) - 1 else None
            choice.push(TokenEvent("r", (token_id,), (-1.0,), "v0", reason))
        choice.finish_reason = "stop"
        [whole] = renderer.whole([choice]).choices
        assert whole.message.content == "Look:" and whole.finish_reason == "tool_calls"
        [call] = whole.message.tool_calls or []
        assert json.loads(call.function.arguments) == {"where": "north"} and call.function.name == "look"
        chunks = [chunk for delta in choice.deltas for chunk in renderer.chunks(choice, delta)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        [[streamed]] = [delta.tool_calls for delta in deltas if delta.tool_calls]
        assert (streamed.index, streamed.id, streamed.function) == (0, call.id, call.function)
        assert "".join(delta.content or "" for delta in deltas) == "Look:"

    run_with_server(folder, story)
