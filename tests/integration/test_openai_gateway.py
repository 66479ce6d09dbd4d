"""The official client at a real gateway with real devices behind it: one changed line, and whatever happens there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.integration import gateways
from tests.integration.devices import eventually
from tests.integration.gateways import AGENT, OPERATOR, RunningGateway

from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset

NAME = "qwen3-3m"
LONG = 3000
TALK: list[Any] = [{"role": "user", "content": "Hello!"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look around.", "parameters": {"type": "object", "properties": {}}},
    }
]
IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(NAME, tmp_path_factory.mktemp("models") / NAME, seed=0)


@pytest.fixture(scope="module")
def found(model: Path) -> Iterator[RunningGateway]:
    with gateways.gateway(model, "beat_s=0.2") as running, gateways.worker(model, running.url, "steady"):
        running.has_open(1)
        yield running


def client_of(running: RunningGateway, **more: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=AGENT, **{"max_retries": 0, "timeout": 60} | more)


@pytest.mark.parametrize("session", [None, "talk"])
def test_chat_whole_and_streamed(found: RunningGateway, session: str | None) -> None:
    wanted: Any = {"model": NAME, "messages": TALK, "max_tokens": 24, "seed": 7, "logprobs": True, "top_logprobs": 2}
    wanted["extra_headers"] = {"X-Session-ID": session} if session else {}
    with client_of(found) as client:
        whole = client.chat.completions.create(**wanted, extra_body=IDS)
        chunks = list(client.chat.completions.create(**wanted, extra_body=IDS, stream=True))
    choice: Any = whole.choices[0]
    parts: list[Any] = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    assert [token for part in parts[1:] for token in part.token_ids] == choice.token_ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids  # type: ignore[attr-defined]
    logprobs = [entry.logprob for part in parts[1:] for entry in part.logprobs.content]
    assert logprobs == [entry.logprob for entry in choice.logprobs.content] and len(logprobs) == 24
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert choice.weight_versions == [{"version": "0", "start": 0, "end": 24}]
    assert parts[-1].finish_reason == choice.finish_reason == "length"


@pytest.mark.parametrize("session", [None, "words"])
def test_completions_whole_and_streamed(found: RunningGateway, session: str | None) -> None:
    wanted: Any = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 24, "seed": 7, "logprobs": 0}
    wanted["extra_body"] = IDS | ({"program_id": session} if session else {})
    with client_of(found) as client:
        whole: Any = client.completions.create(**wanted).choices[0]
        parts: list[Any] = [chunk.choices[0] for chunk in client.completions.create(**wanted, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [value for part in parts for value in part.logprobs.token_logprobs] == whole.logprobs.token_logprobs
    assert parts[0].prompt_token_ids == whole.prompt_token_ids == list(b"Once upon a time")


def test_a_tool_and_its_result_are_part_of_the_prompt(found: RunningGateway) -> None:
    """What this model says is noise; how calls come back is tested with an engine that says what it is told."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"where": "north"}'}}
    talk: list[Any] = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "trees"},
    ]
    wanted: Any = {"model": NAME, "messages": talk, "max_tokens": 4, "tools": TOOLS, "extra_body": IDS}
    with client_of(found) as client:
        reply: Any = client.chat.completions.create(**wanted)
        text = bytes(token for token in reply.prompt_token_ids if token < 256).decode()
        assert all(words in text for words in ('"name": "look"', "Look around.", '{"where": "north"}', "trees"))
        assert reply.choices[0].message.tool_calls is None and reply.choices[0].message.content is not None
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            client.chat.completions.create(**wanted | {"tool_choice": "required"})


def test_many_at_once_each_in_its_own_session(found: RunningGateway) -> None:
    async def talk(client: openai.AsyncOpenAI, number: int) -> list[str]:
        messages, said = list(TALK), []
        for _ in range(3):
            stream = await client.chat.completions.create(
                model=NAME, messages=messages, max_tokens=8, stream=True, extra_body={"trajectory": f"many-{number}"}
            )
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            said.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
        return said

    async def all_of_them() -> list[list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key=AGENT, max_retries=0) as client:
            return await asyncio.gather(*(talk(client, number) for number in range(12)))

    told = asyncio.run(all_of_them())
    assert len({tuple(said) for said in told}) == 12
    for number in range(12):
        finished = found.ask("POST", f"/v1/trajectories/many-{number}/finish", {}).json
        assert (finished["turns"], finished["forks"]) == (3, 0)


@pytest.mark.parametrize("session", [None, "moves"])
def test_a_stream_of_words_goes_on_when_its_worker_is_killed(
    found: RunningGateway, model: Path, session: str | None
) -> None:
    body: Any = IDS | ({"trajectory": session} if session else {})
    wanted: Any = {"model": NAME, "messages": TALK, "max_tokens": LONG, "seed": 5, "logprobs": True, "extra_body": body}
    with client_of(found) as client:
        alone: Any = client.chat.completions.create(**wanted).choices[0]
    with (
        gateways.gateway(model) as running,
        gateways.worker(model, running.url, "a") as first,
        gateways.worker(model, running.url, "b") as second,
        client_of(running) as client,
    ):
        running.has_open(2)
        parts: list[Any] = []
        for chunk in client.chat.completions.create(**wanted, stream=True):
            parts.append(chunk.choices[0])
            if len(parts) == 2:
                [name] = running.members(turns=1)
                os.kill({"a": first, "b": second}[name].process.pid, signal.SIGKILL)
        counts = running.pool()["counts"]
    assert (counts["lost"], counts["ended"]) == (1, 1)
    assert "".join(part.delta.content or "" for part in parts) == alone.message.content
    assert [token for part in parts[1:] for token in part.token_ids] == alone.token_ids
    logprobs = [entry.logprob for part in parts[1:] for entry in part.logprobs.content]
    assert logprobs == [entry.logprob for entry in alone.logprobs.content]
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]


def test_the_client_waits_by_itself_when_the_queue_is_full(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its turn is refused with 429 until a worker has come and taken the one that waits."""
    caplog.set_level(logging.INFO, logger="openai")
    wanted: Any = {"model": NAME, "messages": TALK, "max_tokens": 2, "extra_body": IDS}
    with (
        gateways.gateway(model, "max_waiting=1", "wait_s=60") as running,
        concurrent.futures.ThreadPoolExecutor() as threads,
        client_of(running) as hasty,
        client_of(running, max_retries=20) as patient,
    ):
        first = threads.submit(running.turn, [1, 2, 3], "first", max_tokens=2)
        eventually(lambda: running.pool()["waiting_turns"] == 1)
        with pytest.raises(openai.RateLimitError, match="waiting for a worker") as refused:
            hasty.chat.completions.create(**wanted)
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        second = threads.submit(patient.chat.completions.with_raw_response.create, **wanted)
        eventually(lambda: "Retrying request" in caplog.text)
        with gateways.worker(model, running.url, "late"):
            assert first.result().status == 200
            assert second.result().retries_taken >= 1
            assert second.result().parse().choices[0].finish_reason == "length"


def test_an_operator_sees_and_drains_and_does_not_play(found: RunningGateway, model: Path) -> None:
    with gateways.worker(model, found.url, "drained"):
        found.has_open(2)
        assert found.ask("GET", "/v1/pool", token=OPERATOR).json["members"]
        assert found.ask("POST", "/v1/pool/drained/drain", token=OPERATOR).status == 200
        eventually(lambda: found.members() == ["steady"])
    refused = found.ask("POST", gateways.GENERATE, {"token_ids": [1]}, token=OPERATOR)
    assert refused.status == 403 and "operator" in refused.error["message"]


@pytest.mark.slow
def test_a_model_that_learnt_to_call_a_tool(tmp_path: Path) -> None:
    """A real model on a real device says a call by itself, and the client gets it as one, whole and streamed."""
    talk: list[Any] = [{"role": "user", "content": "What is in the north?"}]
    call = '<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'
    model = taught(tmp_path, talk, f"Let me see.\n{call}")
    wanted: Any = {"model": model.name, "messages": talk, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    wanted["extra_body"] = {"trajectory": "calls", "return_token_ids": True}
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"), client_of(running) as client:
        running.has_open(1)
        whole: Any = client.chat.completions.create(**wanted)
        [choice] = whole.choices
        [said] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        assert said.function.name == "look" and json.loads(said.function.arguments) == {"where": "north"}
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**wanted, stream=True)]
        [streamed] = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
        assert (streamed.index, streamed.id, streamed.function.arguments) == (0, said.id, said.function.arguments)
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
        held = [*whole.prompt_token_ids, *choice.token_ids]
        talk += [choice.message, {"role": "tool", "tool_call_id": said.id, "content": "trees"}]
        after: Any = client.chat.completions.create(**wanted | {"messages": talk})
        assert after.prompt_token_ids[: len(held)] == held and not after.rose["is_fork"]


def taught(place: Path, talk: list[Any], answer: str) -> Path:
    """A small model that has learnt one answer to one conversation by heart."""
    torch = pytest.importorskip("torch")
    from rose.train.checkpoint import export_model
    from rose.train.policy_model import CausalModel, use_threads

    use_threads(1)
    begin = write_preset("frozenlake-1m", place / "begin" / "frozenlake-1m", seed=0)
    folder, model = load_model_folder(begin), CausalModel.load(begin)
    prompt = folder.tokenizer.encode(folder.tokenizer.render_chat(talk, tools=TOOLS), add_special_tokens=False)
    said = [*folder.tokenizer.encode(answer, add_special_tokens=False), folder.spec.eos_token_ids[0]]
    ids = torch.tensor([[*prompt, *said]])
    scored = torch.tensor([[False] * len(prompt) + [True] * len(said)])
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(300):
        optimiser.zero_grad()
        logprobs, _ = model.logprobs(ids, scored)
        (-logprobs.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if float(logprobs.detach().min()) > -0.05:
            break
    return export_model(model, begin, place / "frozenlake-1m")
