"""OpenAI's Responses: the translation to chat requests, and answers as items and as events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from tests.unit.front_world import FrontWorld, run_with_server

from rose.api.requests import Request, TokenEvent
from rose.errors import Unavailable
from rose.models.model_folder import ModelFolder
from rose.openai.generation import Choice, ChoiceText
from rose.openai.http_errors import Failure, bad_request, failure_of
from rose.openai.request_schemas import ChatBody, ChatMessage, Function, Tool
from rose.openai.responses_api import ItemEvents, ItemRenderer, read
from rose.openai.responses_api_schemas import EVENTS, ResponseCreated, StreamedEvent

CALL = '<tool_call>{"name": "look", "arguments": {"where": "north"}}</tool_call>'
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"where":"north"}'}
OUTPUT = {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "trees"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", "content": None}


def said(role: str, *texts: str, **more: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]} | more


def translated(**fields: Any) -> ChatBody:
    return read(json.dumps({"model": "m", "input": "hello"} | fields).encode())


def refusal(**fields: Any) -> str:
    with pytest.raises(Failure) as refused:
        translated(**fields)
    assert refused.value.status == 400
    return refused.value.body.error.message


def shown(chat: ChatBody) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in chat.messages]


ITEMS: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "a text": ("hi", [("user", "hi")]),
    "a message without a type": ([{"role": "user", "content": "hi"}], [("user", "hi")]),
    "parts": ([said("user", "a", "b", id="msg_1", phase="x")], [("user", "a\nb")]),
    "an answer in two parts": ([said("assistant", "a", "b", status="completed")], [("assistant", "ab")]),
    "a refusal": (
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [("assistant", "no")],
    ),
    "reasoning": ([said("user", "a"), REASONING, said("assistant", "b")], [("user", "a"), ("assistant", "b")]),
    "an output in parts": ([OUTPUT | {"output": [{"type": "input_text", "text": "x"}]}], [("tool", "x")]),
}


@pytest.mark.parametrize("items, expected", ITEMS.values(), ids=ITEMS)
def test_items_become_chat_messages(items: Any, expected: list[tuple[str, str]]) -> None:
    assert shown(translated(input=items)) == expected


def test_the_text_and_the_calls_of_one_answer_become_one_message() -> None:
    second = CALLED | {"call_id": "call_2", "name": "wait", "arguments": "{}"}
    talk = [said("user", "go"), said("assistant", "Hm."), CALLED, second, OUTPUT, CALLED, OUTPUT]
    _, answer, result, bare, _ = translated(input=talk).messages
    calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in answer.tool_calls or ()]
    assert answer.content == "Hm." and calls == [("call_1", "look", {"where": "north"}), ("call_2", "wait", {})]
    assert (result.role, result.tool_call_id) == ("tool", "call_1")
    assert bare.content == "" and len(bare.tool_calls or ()) == 1


def test_instructions_come_first() -> None:
    assert shown(translated(instructions="You help."))[0] == ("system", "You help.")
    assert shown(translated(instructions=""))[0] == ("user", "hello")


def test_parameters_are_those_of_chat() -> None:
    chat = translated(
        stream=True, temperature=0.5, top_p=0.9, max_output_tokens=8, tool_choice="none", trajectory="t", seed=3,
        weight_version="1", min_weight_version="2", ignore_eos=True, cache_salt="s", priority=1,
    )  # fmt: skip
    assert (chat.model, chat.stream, chat.temperature, chat.top_p, chat.wanted_tokens) == ("m", True, 0.5, 0.9, 8)
    assert (chat.tool_choice, chat.trajectory, chat.seed, chat.ignore_eos) == ("none", "t", 3, True)
    assert (chat.weight_version, chat.min_weight_version) == ("1", "2")
    assert (chat.cache_salt, chat.priority) == ("s", 1)


def test_only_tools_that_the_client_runs_are_in_the_prompt() -> None:
    function = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}}
    provided = [
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "agents", "tools": [function]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ]
    [tool] = translated(tools=[provided[0], function | {"strict": True}, *provided[1:]]).tools or ()
    assert tool.function == Function("look", "d", {"type": "object"})
    assert translated(tools=provided).tools is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}, {"type": "allowed_tools"}])
def test_a_forced_tool_is_refused_as_in_chat(choice: Any) -> None:
    assert translated(tool_choice=choice).tool_choice == "required"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an earlier response": ({"previous_response_id": "resp_1"}, "send the whole conversation as `input`"),
    "a stored response": ({"store": True}, "`store` is not implemented; leave it out or send false"),
    "a forced form": ({"text": {"format": {"type": "json_schema"}}}, "`text.format`"),
    "a form of another kind": ({"text": {"format": "text"}}, "`text.format`"),
    "log-probabilities": ({"include": ["message.output_text.logprobs"]}, "/v1/chat/completions has them"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "text only"),
    "a part without a text": ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "content[0]`"),
    "another item": ({"input": [{"type": "item_reference", "id": "x"}]}, "`input[0]` has the type `item_reference`"),
    "a call of a provider's tool": ({"input": [{"type": "web_search_call", "id": "x"}]}, "`web_search_call`"),
    "a message without a role": ({"input": [{"content": "x"}]}, "`input[0].role` is missing"),
    "a message without content": ({"input": [{"role": "user"}]}, "`input[0].content` is missing"),
    "an output without content": ({"input": [{"type": "function_call_output"}]}, "`input[0].output` is missing"),
    "a call without a name": ({"input": [{"type": "function_call"}]}, "`input[0].name` is missing"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "`tools[0].name` is missing"),
    "nothing but reasoning": ({"input": [REASONING]}, "`input` has no message"),
    "no items": ({"input": []}, "`input`"),
    "an unknown key": ({"max_output_token": 8}, "did you mean `max_output_tokens`?"),
    "a bound": ({"max_output_tokens": 0}, "`max_output_tokens`"),
    "a long integer": ({"metadata": {"x": 2**2000}}, "1024 bits"),
}


@pytest.mark.parametrize("fields, words", REFUSED.values(), ids=REFUSED)
def test_what_chat_does_not_have_is_refused_in_words(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(**fields)


def test_what_concerns_a_provider_is_accepted_and_changes_nothing() -> None:
    more = {
        "store": False, "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto", "effort": "high"},
        "parallel_tool_calls": True, "prompt_cache_key": "k", "client_metadata": {"x-codex-window-id": "w"},
        "metadata": {"a": "b"}, "text": {"verbosity": "low", "format": {"type": "text"}}, "truncation": "disabled",
        "service_tier": "auto", "user": "u", "safety_identifier": "s", "previous_response_id": None,
        "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    assert translated(**more) == translated()


def answered(world: FrontWorld, words: str, *, by: int = 1, reason: Any = "stop") -> tuple[ItemRenderer, Choice]:
    """Return an answer that came in pieces of `by` tokens."""
    body = ChatBody(messages=[ChatMessage("user", "x")], tools=[Tool(Function("look"))], max_tokens=99)
    choice = Choice(0, Request("r", (1, 2)), ChoiceText(world.front.tokenizer.stream()))
    ids = [*world.front.tokenizer.encode(words, False), 258]
    for start in range(0, len(ids), by):
        piece = tuple(ids[start : start + by])
        ends = reason if start + by >= len(ids) else None
        choice.push(TokenEvent("r", piece, (-1.0,) * len(piece), "v0", ends))
    return ItemRenderer(world.front, body, "resp_1", calls_key="turn-1"), choice


def events_of(renderer: ItemRenderer, choice: Choice) -> list[Any]:
    events: list[Any] = [*renderer.opening([choice])]
    for delta in choice.deltas:
        events += renderer.chunks(choice, delta)
    return [*msgspec.to_builtins(events), msgspec.to_builtins(renderer.usage_chunk([choice]))]


def assembled(events: list[Any]) -> list[Any]:
    """Return the output that a client makes of the events between the first two and the last one."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            continue
        item = items[event["output_index"]]
        assert event.get("item_id", item["id"]) == item["id"]
        match kind:
            case "content_part.added":
                item["content"] = [event["part"]]
            case "output_text.delta":
                item["content"][0]["text"] += event["delta"]
            case "output_text.done":
                assert item["content"][0]["text"] == event["text"]
            case "content_part.done":
                assert item["content"] == [event["part"]]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert (item["name"], item["arguments"]) == (event["name"], event["arguments"])
            case _:
                assert kind == "output_item.done"
                item["status"] = event["item"]["status"]
                item["content"] = list(item.get("content", ()))
                assert item == {"content": []} | event["item"] | {"content": list(event["item"].get("content", ()))}
    return items


WORDS = {"text": "Hello.", "a call": CALL, "both": f"Look: {CALL}", "around": f"a {CALL} b {CALL}", "none": ""}


@pytest.mark.parametrize("by", [1, 7, 1000])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_stream_makes_the_output_of_the_whole_answer(folder: ModelFolder, words: str, by: int) -> None:
    async def story(world: FrontWorld) -> None:
        renderer, choice = answered(world, words, by=by)
        whole = msgspec.to_builtins(renderer.whole([choice]))
        first, second, *events, last = events_of(renderer, choice)
        assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
        assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
        assert last == {"type": "response.completed", "response": whole, "sequence_number": 0}
        made = [{"content": []} | item | {"content": list(item.get("content", ()))} for item in whole["output"]]
        assert assembled(events) == made
        kinds = [item["type"] for item in whole["output"]]
        calls = words.count("<tool_call>")
        assert kinds == ["message"] * (words != CALL) + ["function_call"] * calls
        assert whole["usage"]["input_tokens"] == 2 and whole["usage"]["output_tokens"] == len(choice.token_ids)

    run_with_server(folder, story)


def test_an_answer_of_the_greatest_length_is_incomplete(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        renderer, choice = answered(world, "abc", reason="length")
        *_, item, last = events_of(renderer, choice)
        assert item["item"]["status"] == "incomplete"
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}

    run_with_server(folder, story)


def test_an_answer_that_was_given_up_is_an_error(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        renderer, choice = answered(world, "a", reason="abort")
        with pytest.raises(Unavailable, match="given up"):
            renderer.whole([choice])
        with pytest.raises(Unavailable, match="given up"):
            events_of(renderer, choice)

    run_with_server(folder, story)


def test_an_error_comes_as_an_event_of_its_own_and_as_a_failed_response(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        renderer, choice = answered(world, "abc")
        stream = ItemEvents(make_mocked_request("POST", "/v1/responses"))
        written: list[bytes] = []

        async def write(data: bytes) -> None:
            written.append(data)

        stream._write = write  # type: ignore[method-assign]
        await stream.fail(bad_request("early"))
        await stream.send(renderer.opening([choice]))
        await stream.fail(failure_of(Unavailable("gone")))
        await stream.close()
        events = [json.loads(line[6:]) for line in b"".join(written).splitlines() if line.startswith(b"data: ")]
        kinds = ["error", "response.created", "response.in_progress", "error", "response.failed"]
        assert [event["type"] for event in events] == kinds
        assert [event["sequence_number"] for event in events] == list(range(5))
        assert events[3]["error"]["message"] == events[3]["message"] == "gone"
        assert events[4]["response"]["error"] == {"code": "engine_unavailable", "message": "gone"}

    run_with_server(folder, story)


def test_every_event_is_in_the_table() -> None:
    def leaves(kind: type[StreamedEvent]) -> set[type[StreamedEvent]]:
        below = kind.__subclasses__()
        return set[type[StreamedEvent]]().union(*map(leaves, below)) if below else {kind}

    assert leaves(StreamedEvent) == set(EVENTS) and ResponseCreated in EVENTS
