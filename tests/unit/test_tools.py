"""Tool calls in text: which blocks are calls, and that neither the cut of the text nor a broken block loses letters."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.front.bodies import BodyReader
from rose.front.failures import Failure
from rose.front.neutral import NEUTRAL_CHAT
from rose.front.requests import CalledFunction, CalledTool, ChatBody, Function, Tool
from rose.front.tools import CallFinder, are_parsed, arguments_of, check_tools, plain_tools, said_in, shown

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
def test_stories(story: str, text: str, words: str | None, calls: list[str]) -> None:
    said = said_in(text)
    assert said.text == (text if words is None else words), story
    assert [call.name for call in said.calls] == calls


FRAGMENTS = ["<tool_call>", "</tool_call>", GO, LOOK, "{", '"', " ", "\n", "<", "<tool", "word", "é"]
pieces_of_text = st.lists(st.sampled_from(FRAGMENTS), max_size=8)


@given(pieces_of_text, st.lists(st.integers(0, 300), max_size=12))
def test_how_the_text_is_cut_changes_nothing(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    finder = CallFinder()
    said = [finder.push(text[start:end]) for start, end in itertools.pairwise(places)] + [finder.finish()]
    whole = said_in(text)
    assert "".join(one.text for one in said) == whole.text
    assert [call for one in said for call in one.calls] == whole.calls
    assert [call.number for call in whole.calls] == list(range(len(whole.calls)))


@given(pieces_of_text)
def test_nothing_that_is_no_call_is_lost(parts: list[str]) -> None:
    text = "".join(parts)
    said = said_in(text)
    left = text.replace(LOOK, "").replace(GO, "")
    if not said.calls:
        assert said.text == text
    assert [mark for mark in said.text if not mark.isspace()] == [mark for mark in left if not mark.isspace()] or (
        "<tool_call>" in left
    )


def test_a_call_is_shown_as_openai_does_and_has_the_same_id_again() -> None:
    [call] = said_in('<tool_call>{"name": "look", "arguments": {"where": "né", "n": 1.5}}</tool_call>').calls
    first, again, other = shown(call, "turn"), shown(call, "turn"), shown(call, "another turn")
    assert json.loads(first.function.arguments) == {"where": "né", "n": 1.5} and "é" in first.function.arguments
    assert msgspec.to_builtins(first)["type"] == "function"
    assert first.id == again.id != other.id and first.id.startswith("call_")


def body(**changes: Any) -> ChatBody:
    known = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    return BodyReader(ChatBody, NEUTRAL_CHAT).read(msgspec.json.encode(known | changes))


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
