"""Tool calls: found in a model's text, shown to clients, rendered into prompts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.front_world import FrontWorld, run_with_server

from rose.models.model_folder import ModelFolder
from rose.openai import tools
from rose.openai.http_errors import Failure
from rose.openai.request_parsing import CONTAINERS_MAX, BodyReader
from rose.openai.request_schemas import IGNORED_CHAT, CalledFunction, CalledTool, ChatBody, Function, Tool
from rose.openai.tools import CallFinder, are_parsed, arguments_of, check_tools, parse_text, plain_tools, tool_call_of

LOOK = '<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'

GO = '<tool_call>{"name": "go", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "story, text, words, calls",
    [
        ("no call", "hello \n", "hello \n", []),
        ("a call", LOOK, "", ["look"]),
        ("words before it", f"Let me see.\n{LOOK}", "Let me see.", ["look"]),
        ("two calls", f"{LOOK}\n{GO}", "", ["look", "go"]),
        ("words after it stay", f"so {GO}\n then", "so\n then", ["go"]),
        ("blank space after the last is the format's", f"{GO}\n\n", "", ["go"]),
        ("no arguments are an empty object", '<tool_call>{"name": "go"}</tool_call>', "", ["go"]),
        ("the closing mark may be missing at the end", LOOK.removesuffix("</tool_call>"), "", ["look"]),
        ("broken JSON stays text", "<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
        ("broken, then right", f"<tool_call>x</tool_call>{GO}", "<tool_call>x</tool_call>", ["go"]),
        ("a mark inside a broken block", f"<tool_call>x{GO}", "<tool_call>x", ["go"]),
        ("an open block that is no call", '<tool_call>{"name": "lo', '<tool_call>{"name": "lo', []),
        ("not an object", "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("no name", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        ("half a mark", "a <tool_ca", "a <tool_ca", []),
        ("a number that JSON does not have", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', None, []),
        ("half a character", '<tool_call>{"name": "a\\ud800"}</tool_call>', None, []),
        ("deep nesting", f"<tool_call>{'[' * 100_000}</tool_call>", None, []),
    ],
)
def test_calls_are_parsed(story: str, text: str, words: str | None, calls: list[str]) -> None:
    said = parse_text(text)
    assert said.text == (text if words is None else words), story
    assert [call.name for call in said.calls] == calls


FRAGMENTS = ["<tool_call>", "</tool_call>", GO, LOOK, "{", '"', " ", "\n", "<", "<tool", "word", "é"]


pieces_of_text = st.lists(st.sampled_from(FRAGMENTS), max_size=8)


@given(pieces_of_text, st.lists(st.integers(0, 300), max_size=12))
def test_the_result_does_not_depend_on_pieces(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    finder = CallFinder()
    said = [finder.push(text[start:end]) for start, end in itertools.pairwise(places)] + [finder.finish()]
    whole = parse_text(text)
    assert "".join(one.text for one in said) == whole.text
    assert [call for one in said for call in one.calls] == whole.calls
    assert [call.number for call in whole.calls] == list(range(len(whole.calls)))


@given(pieces_of_text)
def test_text_that_is_no_call_is_kept(parts: list[str]) -> None:
    text = "".join(parts)
    said = parse_text(text)
    left = text.replace(LOOK, "").replace(GO, "")
    if not said.calls:
        assert said.text == text
    assert [mark for mark in said.text if not mark.isspace()] == [mark for mark in left if not mark.isspace()] or (
        "<tool_call>" in left
    )


def test_a_call_is_shown_as_openai_does_and_has_the_same_id_again() -> None:
    [call] = parse_text('<tool_call>{"name": "look", "arguments": {"where": "né", "n": 1.5}}</tool_call>').calls
    first, again, other = (tool_call_of(call, key) for key in ("turn", "turn", "another turn"))
    assert json.loads(first.function.arguments) == {"where": "né", "n": 1.5} and "é" in first.function.arguments
    assert msgspec.to_builtins(first)["type"] == "function"
    assert first.id == again.id != other.id and first.id.startswith("call_")


def body(**changes: Any) -> ChatBody:
    known = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    return BodyReader(ChatBody, IGNORED_CHAT).read(msgspec.json.encode(known | changes))


@pytest.mark.parametrize(
    "changes, parser, is_parsed",
    [
        ({}, "hermes", True),
        ({"tool_choice": "auto"}, "hermes", True),
        ({"tool_choice": "none"}, "hermes", False),
        ({"tools": []}, "hermes", False),
        ({}, "text", False),
    ],
)
def test_when_calls_are_looked_for(changes: dict[str, Any], parser: str, is_parsed: bool) -> None:
    assert are_parsed(body(**changes), parser) is is_parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_cannot_be_forced(choice: Any) -> None:
    with pytest.raises(Failure, match="not forced"):
        check_tools(body(tool_choice=choice))
    check_tools(body(tool_choice="auto"))


@pytest.mark.parametrize("text, found", [("", {}), ("{}", {}), ('{"a": [1]}', {"a": [1]})])
def test_arguments_are_an_object(text: str, found: dict[str, Any]) -> None:
    assert arguments_of(CalledTool(CalledFunction("f", text)), "here") == found


@pytest.mark.parametrize("text", ["[]", "{", "1", "[" * 100_000, '{"a": NaN}'])
def test_arguments_that_are_none(text: str) -> None:
    with pytest.raises(Failure, match=r"here\.function\.arguments"):
        arguments_of(CalledTool(CalledFunction("f", text)), "here")


def test_templates_see_what_models_are_trained_on() -> None:
    tool = Tool(Function("look", None, {"type": "object", "properties": {}}, strict=True))
    assert plain_tools([tool]) == [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    ]
    assert plain_tools([]) is None


LISTS = b"[" + b",".join([b"[]"] * CONTAINERS_MAX) + b"]"


def test_arguments_with_too_many_values_are_refused_before_they_are_decoded(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    keep = tools._load

    def note(text: str) -> Any:
        decoded.append(len(text))
        return keep(text)

    monkeypatch.setattr(tools, "_load", note)

    async def story(found: FrontWorld) -> None:
        for arguments, status in (('{"a": 1}', 200), (f'{{"a": {LISTS.decode()}}}', 400)):
            call = {"function": {"name": "f", "arguments": arguments}}
            messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "x"}]
            body = {"messages": messages, "max_tokens": 1}
            assert (await found.post("/v1/chat/completions", body))[0] == status
        assert decoded == [8]

    run_with_server(folder, story)
