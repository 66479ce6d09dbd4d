"""`POST /v1/responses` with the official client: at a real gateway and at a real device, each with a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.integration import devices, gateways
from tests.integration.gateways import AGENT, RunningGateway

from rose.models.presets import write_preset

NAME = "qwen3-3m"
TOOLS: list[Any] = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
ORDER = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.incomplete",
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    model = write_preset(NAME, tmp_path_factory.mktemp("models") / NAME, seed=0)
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"):
        running.has_open(1)
        yield running


def client_at(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def check_events(client: openai.OpenAI, wanted: Any, words: str) -> None:
    """Stream a request that was answered with these words: the events come in the order that clients expect."""
    events: list[Any] = list(client.responses.create(**wanted, stream=True))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == words
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.usage.output_tokens == wanted["max_output_tokens"]


def test_a_device_answers_the_official_client(client: openai.OpenAI, device: devices.Device) -> None:
    model = client.models.list().data[0].id
    wanted: Any = {"model": model, "input": "Say hello", "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
    wanted |= {"temperature": 0.0, "tools": TOOLS}
    reply: Any = client.responses.create(**wanted, instructions="You help.")
    assert (reply.object, reply.status, reply.model) == ("response", "incomplete", model)
    assert reply.usage.total_tokens == reply.usage.input_tokens + 8
    check_events(client, wanted | {"instructions": "You help."}, reply.output_text)
    with pytest.raises(openai.BadRequestError, match="whole conversation"):
        client.responses.create(**wanted, previous_response_id=reply.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**(wanted | {"model": "other"}))


@pytest.mark.parametrize("place", ["key", "path"])
def test_the_turns_of_a_session_continue_the_stored_tokens(found: RunningGateway, place: str) -> None:
    name = f"by-{place}"
    url, key = (found.url, f"{AGENT}/{name}") if place == "key" else (f"{found.url}/sessions/{name}", AGENT)
    talk: list[Any] = [{"role": "user", "content": "Where am I?"}]
    wanted: Any = {"model": NAME, "max_output_tokens": 12, "tools": TOOLS, "store": False}
    wanted["extra_body"] = {"ignore_eos": True}
    with client_at(url, key) as client:
        first: Any = client.responses.create(input=talk, **wanted)
        assert first.rose == {"workers": ["a"], "trajectory": name, "turn": 0, "is_fork": False}
        check_events(client, wanted | {"input": talk}, first.output_text)
        talk += [item.model_dump(exclude_none=True) for item in first.output]
        talk.append({"role": "user", "content": "And now?"})
        second: Any = client.responses.create(input=talk, **wanted)
    assert second.rose == {"workers": ["a"], "trajectory": name, "turn": 1, "is_fork": False}
    ended = found.ask("POST", f"/v1/trajectories/{name}/finish", {}).json
    assert (ended["turns"], ended["forks"]) == (2, 0)


def test_a_single_turn_needs_no_session(found: RunningGateway) -> None:
    with client_at(found.url, AGENT) as client:
        reply: Any = client.responses.create(model=NAME, input="hello", max_output_tokens=4)
        assert reply.rose == {"workers": ["a"]}
        with pytest.raises(openai.ConflictError):
            client.responses.create(model=NAME, input="hello", extra_body={"weight_version": "9"})
    with client_at(found.url, "x" * 24) as client, pytest.raises(openai.AuthenticationError):
        client.responses.create(model=NAME, input="hello")
