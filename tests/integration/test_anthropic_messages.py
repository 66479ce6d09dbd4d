"""`POST /v1/messages` at a real gateway with a real engine behind it, with requests in the form of Claude Code's.

Recorded of Claude Code 2.1.328 (`claude -p`), with the settings that examples/command_line_agents.md shows. Texts and
tools are short here; fields, headers and blocks are those of the program. It is not installed. The hash of the request
at the head of the system prompt (`cch`) is what earlier versions send.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration import gateways
from tests.integration.devices import Answer
from tests.integration.gateways import AGENT, OPERATOR, RunningGateway

from rose.models.presets import write_preset

NAME, MESSAGES = "qwen3-3m", "/v1/messages"
CACHED = {"cache_control": {"type": "ephemeral"}}
TOOL = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"file_path": {"type": "string"}},
        "required": ["file_path"],
        "additionalProperties": False,
    },
}
DEFERRED = {
    "name": "DeferredToolPlaceholder",
    "description": "Reserved placeholder.",
    "input_schema": {"type": "object", "properties": {}},
    "defer_loading": True,
}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "User-Agent": "claude-cli/2.1.328 (external, sdk-cli)",
    "X-Claude-Code-Session-Id": "d70258ff-fd1a-414c-87eb-9cf65edb66ac",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "X-Stainless-Lang": "js",
    "X-Stainless-Retry-Count": "0",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    model = write_preset(NAME, tmp_path_factory.mktemp("models") / NAME, seed=0)
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"):
        running.has_open(1)
        yield running


def block(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def claude_code(messages: list[Any], hashed: str = "eb6c6", **more: Any) -> dict[str, Any]:
    billing = f"x-anthropic-billing-header: cc_version=2.1.328.45d; cc_entrypoint=sdk-cli; cch={hashed};"
    return {
        "model": NAME,
        "messages": messages,
        "system": [block(billing), block("You are an agent.", **CACHED), block("You help.", **CACHED)],
        "tools": [TOOL, DEFERRED],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        "max_tokens": 24,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    } | more


def by_bearer(key: str) -> dict[str, str]:
    return HEADERS | {"Authorization": f"Bearer {key}"}


def by_api_key(key: str) -> dict[str, str]:
    return HEADERS | {"x-api-key": key}


def post(found: RunningGateway, body: Any, headers: dict[str, str], path: str = f"{MESSAGES}?beta=true") -> Answer:
    return found.device.ask("POST", path, body, headers=headers)


def events_of(answer: Answer) -> list[Any]:
    """Return the events of a stream; each is named as its data says."""
    assert answer.status == 200, answer.body
    *parts, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        match = re.fullmatch("event: (.*)\ndata: (.*)", part)
        assert match is not None, part
        events.append(json.loads(match[2]))
        assert events[-1]["type"] == match[1]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    return events


def text_of(events: list[Any]) -> str:
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas)


@pytest.mark.parametrize("headers_of", [by_bearer, by_api_key])
def test_the_turns_of_a_session_continue_the_stored_tokens(found: RunningGateway, headers_of: Any) -> None:
    name = headers_of.__name__
    headers = headers_of(f"{AGENT}/{name}")
    opening: list[Any] = [
        {"role": "user", "content": [block("<system-reminder>x</system-reminder>"), block("Go.")]},
        {"role": "system", "content": [block("# Environment", **CACHED)]},
    ]
    first = events_of(post(found, claude_code(opening), headers))
    start, end = first[0]["message"], first[-2]
    assert (start["role"], start["model"], start["content"]) == ("assistant", NAME, [])
    assert end["type"] == "message_delta" and end["delta"]["stop_reason"] in ("max_tokens", "end_turn")
    assert start["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 0
    assert 0 < end["usage"]["output_tokens"] <= 24
    # The mark of the cache moves, so a list becomes a text, and the hash is another.
    opening[1]["content"] = "# Environment"
    answer = {"role": "assistant", "content": [block(text_of(first))]}
    talk = [*opening, answer, {"role": "user", "content": [block("On.", **CACHED)]}]
    second = events_of(post(found, claude_code(talk, "0aaa9"), headers))
    assert second[-2]["rose"] == {"workers": ["a"], "trajectory": name, "turn": 1, "is_fork": False}
    ended = found.ask("POST", f"/v1/trajectories/{name}/finish", {}).json
    assert (ended["turns"], ended["forks"]) == (2, 0)


@pytest.mark.parametrize("path, session", [("/sessions/in-path", None), ("", "in-header")])
def test_a_session_may_be_named_in_the_path_or_in_a_header(
    found: RunningGateway, path: str, session: str | None
) -> None:
    headers = by_api_key(AGENT) | ({"X-Session-ID": session} if session else {})
    body = claude_code([{"role": "user", "content": "Go."}], stream=False)
    reply = post(found, body, headers, f"{path}{MESSAGES}").json
    assert reply["type"] == "message" and reply["rose"]["trajectory"] == (session or "in-path")
    again = post(found, body, headers, f"{path}{MESSAGES}").json
    assert again["content"] == reply["content"] and again["rose"]["turn"] == 0
    assert again["usage"] == reply["usage"]


def test_without_a_session_a_message_is_a_single_turn(found: RunningGateway) -> None:
    body = claude_code([{"role": "user", "content": "Go."}])
    reply = post(found, body | {"stream": False}, by_api_key(AGENT)).json
    assert reply["rose"] == {"workers": ["a"]}
    events = events_of(post(found, body, by_api_key(AGENT)))
    counted = {key: body[key] for key in ("model", "messages", "system", "tools", "thinking")}
    count = post(found, counted, by_api_key(AGENT), "/v1/messages/count_tokens?beta=true").json
    assert count == {"input_tokens": reply["usage"]["input_tokens"]}
    assert events[0]["message"]["usage"]["input_tokens"] == count["input_tokens"]


GO = [{"role": "user", "content": "Go."}]
REFUSED: dict[str, tuple[dict[str, str], Any, int, str]] = {
    "no key": (HEADERS, claude_code(GO), 401, "authentication_error"),
    "an empty key": (by_api_key(""), claude_code(GO), 401, "authentication_error"),
    "a wrong key": (by_api_key("x" * 24), claude_code(GO), 401, "authentication_error"),
    "a key with a word before": (by_api_key(f"Bearer {AGENT}"), claude_code(GO), 401, "authentication_error"),
    "no token in Authorization": (by_api_key(AGENT) | {"Authorization": "x"}, claude_code(GO), 401, "authentication"),
    "another role": (by_api_key(OPERATOR), claude_code(GO), 403, "permission_error"),
    "another model": (by_api_key(AGENT), claude_code(GO, model="claude-haiku"), 404, "not_found_error"),
    "a forced tool": (by_api_key(AGENT), claude_code(GO, tool_choice={"type": "any"}), 400, "invalid_request_error"),
    "too long": (by_api_key(AGENT), claude_code(GO, max_tokens=32_000), 400, "invalid_request_error"),
    "not JSON's shape": (by_api_key(AGENT), [], 400, "invalid_request_error"),
    "two names": (
        by_api_key(f"{AGENT}/one") | {"X-Session-ID": "two"},
        claude_code(GO),
        400,
        "invalid_request_error",
    ),
}


@pytest.mark.parametrize("headers, body, status, kind", REFUSED.values(), ids=REFUSED)
def test_errors_have_anthropics_shape(
    found: RunningGateway, headers: dict[str, str], body: Any, status: int, kind: str
) -> None:
    refused = post(found, body, headers)
    assert refused.status == status
    assert refused.json["type"] == "error" and refused.json["error"]["type"].startswith(kind)
    assert refused.json["error"]["message"] and AGENT not in refused.body.decode()


def test_another_method_is_refused_in_the_same_shape(found: RunningGateway) -> None:
    refused = found.device.ask("GET", MESSAGES, headers=by_api_key(AGENT))
    assert (refused.status, refused.json["type"]) == (405, "error")
