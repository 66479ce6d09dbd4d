"""Anthropic's messages: the translation to chat requests, and answers as messages and as events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tests.unit.front_world import FrontWorld, run_with_server

from rose.api.requests import Request, TokenEvent
from rose.errors import QueueFull, Unavailable
from rose.models.model_folder import ModelFolder
from rose.openai.anthropic_messages import (
    COUNT_READER,
    READER,
    MessageRenderer,
    chat_of,
    error_of,
    error_response,
    is_message_path,
)
from rose.openai.generation import Choice, ChoiceText
from rose.openai.http_errors import Failure, bad_request, failure_of
from rose.openai.request_schemas import ChatBody, ChatMessage, Function, Tool

CALL = '<tool_call>{"name": "look", "arguments": {"where": "north"}}</tool_call>'
LEAST = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"where": "north"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "trees"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def translated(**fields: Any) -> ChatBody:
    return chat_of(READER.read(json.dumps(LEAST | fields).encode()))


def refusal(**fields: Any) -> str:
    with pytest.raises(Failure) as refused:
        translated(**fields)
    assert refused.value.status == 400
    return refused.value.body.error.message


MESSAGES: dict[str, tuple[list[Any], list[Any]]] = {
    "a text": ([{"role": "user", "content": "hi"}], [("user", "hi")]),
    "texts, cached": ([{"role": "user", "content": [text("a", **EPHEMERAL), text("b")]}], [("user", "a\nb")]),
    "a system message between": (
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        [("system", "s"), ("user", "u")],
    ),
    "an answer in two blocks": (
        [{"role": "assistant", "content": [text("a"), text("b")]}, {"role": "user", "content": "u"}],
        [("assistant", "ab"), ("user", "u")],
    ),
    "thinking": (
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "y"},
                    text("a"),
                ],
            },
            {"role": "user", "content": "u"},
        ],
        [("assistant", "a"), ("user", "u")],
    ),
    "results before and after a text": (
        [{"role": "user", "content": [RESULT, text("and"), RESULT | {"content": [text("x"), text("y")]}]}],
        [("tool", "trees"), ("user", "and"), ("tool", "x\ny")],
    ),
    "an empty result, an error": (
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": True}]}],
        [("tool", "")],
    ),
    "an empty list": ([{"role": "user", "content": []}], [("user", "")]),
}


@pytest.mark.parametrize("messages, expected", MESSAGES.values(), ids=MESSAGES)
def test_messages_become_chat_messages(messages: list[Any], expected: list[Any]) -> None:
    assert [(message.role, message.text) for message in translated(messages=messages).messages] == expected


def test_a_tool_use_becomes_a_call_and_its_result_names_it() -> None:
    talk = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [text("Let me see."), USE | EPHEMERAL]},
        {"role": "user", "content": [RESULT | EPHEMERAL]},
    ]
    _, answer, result = translated(messages=talk).messages
    [call] = answer.tool_calls or []
    assert answer.content == "Let me see." and call.id == result.tool_call_id == "call_1"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"where": "north"})


def test_the_system_prompt_comes_first_without_the_hash_of_the_request() -> None:
    blocks = [text("x-anthropic-billing-header: cc_version=2.1; cch=eb6c6;"), text("You help.", **EPHEMERAL)]
    for system in (blocks, "You help."):
        first, *_ = translated(system=system).messages
        assert (first.role, first.text) == ("system", "You help.")
    for nothing in (None, [], blocks[:1]):
        assert [message.role for message in translated(system=nothing).messages] == ["user"]


def test_parameters_and_tools_are_those_of_chat() -> None:
    tool = {"name": "look", "description": "What is there?", "input_schema": {"type": "object"}} | EPHEMERAL
    chat = translated(
        tools=[tool, {"name": "wait", "type": "custom"}],
        tool_choice={"type": "none"},
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["END"],
    )
    assert (chat.model, chat.wanted_tokens, chat.stream, chat.stop) == ("m", 8, True, ["END"])
    assert (chat.temperature, chat.top_p, chat.top_k, chat.tool_choice) == (0.5, 0.9, 3, "none")
    look, wait = chat.tools or []
    assert look.function == Function("look", "What is there?", {"type": "object"})
    assert wait.function.parameters == {"type": "object", "properties": {}}
    assert translated(tool_choice={"type": "auto", "disable_parallel_tool_use": True}).tool_choice == "auto"


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_a_forced_tool_is_refused_as_in_chat(kind: str) -> None:
    assert translated(tool_choice={"type": kind, "name": "look"}).tool_choice == "required"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an image": ({"messages": [{"role": "user", "content": [text("x"), IMAGE]}]}, "content[1]` is a block of the type"),
    "an image in a result": (
        {"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]},
        "messages[0].content[0].content[0]` is a block of the type `image`",
    ),
    "a document": ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "reads text only"),
    "a call of the user": ({"messages": [{"role": "user", "content": [USE]}]}, "`user` has no blocks"),
    "a result of the assistant": (
        {"messages": [{"role": "assistant", "content": [RESULT]}, {"role": "user", "content": "x"}]},
        "`assistant` has no blocks of the type `tool_result`",
    ),
    "a begun answer": ({"messages": [{"role": "assistant", "content": "I"}]}, "are not continued"),
    "a tool of the provider": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "send tools"),
    "a forced form": ({"output_config": {"format": {"type": "json_schema"}}}, "`output_config.format`"),
    "an unknown key": ({"max_token": 8}, "did you mean `max_tokens`?"),
    "an unknown key inside": ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "unknown parameter"),
    "a bound": ({"max_tokens": 0}, "`max_tokens`"),
    "too many stops": ({"stop_sequences": ["a"] * 5}, "`stop_sequences`"),
    "no messages": ({"messages": []}, "`messages`"),
    "a container": ({"container": "x"}, "`container` is not implemented"),
    "a deep input": ({"metadata": {"user_id": 2**2000}}, "1024 bits"),
}


@pytest.mark.parametrize("fields, words", REFUSED.values(), ids=REFUSED)
def test_what_chat_does_not_have_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(**fields)


def test_what_concerns_a_provider_is_accepted_and_changes_nothing() -> None:
    more = {
        "metadata": {"user_id": "user_x"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "output_config": {"effort": "high"},
        "betas": ["claude-code-20250219"],
        "service_tier": "auto",
    } | EPHEMERAL
    assert translated(**more) == translated()


def test_counting_needs_no_max_tokens() -> None:
    body = COUNT_READER.read(json.dumps({"model": "m", "messages": LEAST["messages"]}).encode())
    assert [message.text for message in chat_of(body).messages] == ["hello"]


def answered(world: FrontWorld, words: str, *, by: int = 1, reason: Any = "stop") -> tuple[MessageRenderer, Choice]:
    """Return an answer that came in pieces of `by` tokens."""
    body = ChatBody(messages=[ChatMessage("user", "x")], tools=[Tool(Function("look"))])
    choice = Choice(0, Request("r", (1, 2)), ChoiceText(world.front.tokenizer.stream(), ("STOP",)))
    ids = [*world.front.tokenizer.encode(words, False), 258]
    for start in range(0, len(ids), by):
        piece = tuple(ids[start : start + by])
        ends = reason if start + by >= len(ids) else None
        choice.push(TokenEvent("r", piece, (-1.0,) * len(piece), "v0", ends))
    return MessageRenderer(world.front, body, "msg_1", calls_key="turn-1"), choice


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of the events."""
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            block["text" if delta["type"] == "text_delta" else "json"] += delta.get("text", delta.get("partial_json"))
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            if arguments := block.pop("json"):
                block["input"] = json.loads(arguments)
        else:
            assert event["type"] == "message_delta"
            message |= event["delta"] | {"usage": event["usage"]}
    return message


WORDS = {"text": "Hello.", "a call": CALL, "both": f"Look: {CALL}", "around": f"a {CALL} b {CALL}", "none": ""}


@pytest.mark.parametrize("by", [1, 7, 1000])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_stream_makes_the_message_of_the_whole_answer(folder: ModelFolder, words: str, by: int) -> None:
    async def story(world: FrontWorld) -> None:
        renderer, choice = answered(world, words, by=by)
        whole = msgspec.to_builtins(renderer.whole([choice]))
        events = [*renderer.opening([choice])]
        for delta in choice.deltas:
            events += renderer.chunks(choice, delta)
        assert assembled(msgspec.to_builtins(events)) == whole
        assert msgspec.to_builtins(renderer.usage_chunk([choice])) == {"type": "message_stop"}
        calls = words.count("<tool_call>")
        assert whole["stop_reason"] == ("tool_use" if calls else "end_turn")
        assert [block["type"] for block in whole["content"]].count("tool_use") == calls
        assert all(block["input"] == {"where": "north"} for block in whole["content"] if block["type"] == "tool_use")
        assert whole["usage"] == {"input_tokens": 2, "output_tokens": len(choice.token_ids)}

    run_with_server(folder, story)


@pytest.mark.parametrize(
    "words, reason, expected",
    [
        ("a", "stop", ("end_turn", None)),
        ("a", "length", ("max_tokens", None)),
        (CALL, "length", ("max_tokens", None)),
        ("a STOP b", "stop", ("stop_sequence", "STOP")),
    ],
)
def test_how_an_answer_ended_has_anthropics_words(folder: ModelFolder, words: str, reason: str, expected: Any) -> None:
    async def story(world: FrontWorld) -> None:
        renderer, choice = answered(world, words, by=1000, reason=reason)
        reply = renderer.whole([choice])
        assert (reply.stop_reason, reply.stop_sequence) == expected

    run_with_server(folder, story)


def test_an_answer_that_was_given_up_is_an_error(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        renderer, choice = answered(world, "a", reason="abort")
        with pytest.raises(Unavailable, match="given up"):
            renderer.whole([choice])

    run_with_server(folder, story)


@pytest.mark.parametrize(
    "failure, kind",
    [
        (bad_request("x"), "invalid_request_error"),
        (Failure(401, "x"), "authentication_error"),
        (Failure(403, "x"), "permission_error"),
        (Failure(404, "x"), "not_found_error"),
        (Failure(409, "x"), "invalid_request_error"),
        (Failure(413, "x"), "request_too_large"),
        (failure_of(QueueFull("x")), "rate_limit_error"),
        (Failure(500, "x"), "api_error"),
        (failure_of(Unavailable("x")), "overloaded_error"),
        (Failure(504, "x"), "api_error"),
    ],
)
def test_errors_have_anthropics_shape_and_the_houses_status(failure: Failure, kind: str) -> None:
    expected = {"type": "error", "error": {"type": kind, "message": "x"}}
    assert msgspec.to_builtins(error_of(failure)) == expected
    response = error_response(failure)
    assert response.status == failure.status and json.loads(response.text or "") == expected
    assert all(response.headers[name] == value for name, value in failure.headers.items())


def test_an_error_may_quote_bytes_that_are_no_text() -> None:
    assert error_of(bad_request("a \udcff b")).error.message == "a ? b"


def test_the_paths_of_this_api_are_known() -> None:
    for path in ("/v1/messages", "/sessions/s/v1/messages", "/v1/messages/count_tokens"):
        assert is_message_path(path)
    assert not is_message_path("/v1/chat/completions")
