"""What command-line agents send over HTTP, against a real gateway with a real engine behind it.

Recorded of Qwen Code 0.24.4 (`qwen -p`), OpenCode 1.18.33 (`opencode run`) and Codex 0.169.0 (`codex exec`), with the
settings that examples/command_line_agents.md shows. Texts and tools are short here; the fields, headers and their
values are those of the programs. The programs are not installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration import devices, gateways
from tests.integration.codex import CODEX_INPUT, codex_request, said
from tests.integration.devices import Answer
from tests.integration.gateways import AGENT, RunningGateway

from rose.models.presets import write_preset

NAME, CHAT = "qwen3-3m", "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Returns the content of a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
STREAMED = {"model": NAME, "stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
PARTS = [{"type": "text", "text": "The date is today."}, {"type": "text", "text": "Say hello"}]
QWEN: list[Any] = [{"role": "system", "content": "You help."}, {"role": "user", "content": PARTS}]
OPENCODE: list[Any] = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Say hello"}]
STAINLESS = {"User-Agent": "QwenCode/0.24.4 (linux; x64)", "x-stainless-lang": "js", "x-stainless-retry-count": "0"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    model = write_preset(NAME, tmp_path_factory.mktemp("models") / NAME, seed=0)
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"):
        running.has_open(1)
        yield running


def qwen_code(key: str) -> dict[str, str]:
    return STAINLESS | {"Authorization": f"Bearer {key}"}


def opencode(key: str, session: str) -> dict[str, str]:
    """OpenCode names its own session in two headers, whatever the key is."""
    return {"Authorization": f"Bearer {key}", "x-session-affinity": session, "x-session-id": session}


def post(found: RunningGateway, body: Any, headers: dict[str, str], path: str = CHAT) -> Answer:
    return found.device.ask("POST", path, body, headers=headers)


def events(answer: Answer) -> list[Any]:
    """Return the events of a stream, which must end as OpenAI's do: with the usage, and then a mark."""
    assert answer.status == 200, answer.body
    *lines, last = re.findall(rb"^data: (.*)$", answer.body, re.MULTILINE)
    assert last == b"[DONE]"
    found = [json.loads(line) for line in lines]
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] > 0
    return found


def text_of(found: list[Any]) -> str:
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


AGENTS = {
    "qwen-code": (QWEN, {}, lambda session: qwen_code(f"{AGENT}/{session}")),
    "opencode": (OPENCODE, {"tool_choice": "auto"}, lambda session: opencode(AGENT, session)),
}


@pytest.mark.parametrize("agent", AGENTS)
def test_the_turns_of_an_agent_are_one_trajectory(found: RunningGateway, agent: str) -> None:
    messages, more, headers_of = AGENTS[agent]
    body, headers = STREAMED | more | {"max_tokens": 24}, headers_of(f"ses_{agent}")
    first = events(post(found, body | {"messages": messages}, headers))
    talk = [*messages, {"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Go on."}]
    events(post(found, body | {"messages": talk}, headers))
    ended = found.ask("POST", f"/v1/trajectories/ses_{agent}/finish", {}).json
    assert (ended["turns"], ended["forks"]) == (2, 0)


@pytest.mark.parametrize("agent", AGENTS)
def test_more_tokens_than_the_context_has_are_refused_in_words(found: RunningGateway, agent: str) -> None:
    """Both ask for 32,000 by default, which needs a model with a longer context, or the setting that the page shows."""
    messages, more, headers_of = AGENTS[agent]
    refused = post(found, STREAMED | more | {"messages": messages, "max_tokens": 32_000}, headers_of("ses_long"))
    assert refused.status == 400 and "8192" in refused.error["message"]


def test_opencode_must_not_have_a_second_name_in_its_key(found: RunningGateway) -> None:
    body = STREAMED | {"messages": OPENCODE, "max_tokens": 4}
    refused = post(found, body, opencode(f"{AGENT}/another", "ses_1"))
    assert refused.status == 400 and "another" in refused.error["message"]


def codex_events(found: RunningGateway, items: list[Any]) -> list[Any]:
    headers = {"Authorization": f"Bearer {AGENT}/ses_codex", "Accept": "text/event-stream", "session-id": "01a1f60c"}
    body = codex_request(NAME, items, max_output_tokens=24, ignore_eos=True)
    answer = post(found, body, headers, "/v1/responses")
    assert answer.status == 200, answer.body
    events = re.findall(rb"^event: (.*)\ndata: (.*)\n\n", answer.body, re.MULTILINE)
    parsed = [json.loads(data) for _, data in events]
    assert [name.decode() for name, _ in events] == [event["type"] for event in parsed]
    assert parsed[-1]["type"] == "response.incomplete" and b"[DONE]" not in answer.body
    return parsed


def test_the_turns_of_codex_are_one_trajectory(found: RunningGateway) -> None:
    """It sends back the items that it got, each with the fields that it keeps."""
    done = [event["item"] for event in codex_events(found, CODEX_INPUT) if event["type"] == "response.output_item.done"]
    [message] = done
    back = {**message, "content": [{"type": "output_text", "text": message["content"][0]["text"], "annotations": []}]}
    codex_events(found, [*CODEX_INPUT, back, said("user", "Go on.", 5)])
    ended = found.ask("POST", "/v1/trajectories/ses_codex/finish", {}).json
    assert (ended["turns"], ended["forks"]) == (2, 0)


def test_the_page_says_what_was_replayed() -> None:
    page = (devices.ROOT / "examples" / "command_line_agents.md").read_text()
    for words in ("Qwen Code 0.24.4", "OpenCode 1.18.33", "Codex 0.169.0", "/v1/responses", "Claude Code 2.1.328"):
        assert words in page
