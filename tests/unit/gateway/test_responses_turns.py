"""The official client's Responses on a gateway: histories that it sends back continue from the sampled tokens."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.integration.parrot import ParrotEngine, told
from tests.unit.rollout_world import TOKENS, World, tell

from rose.config.server_settings import EngineSettings
from rose.models.model_folder import ModelFolder

CALLS = [
    f'<tool_call>\n{{"name": "look", "arguments": {{"where": "{where}"}}}}\n</tool_call>'
    for where in ("north", "south")
]
TOOLS: list[Any] = [
    {"type": "function", "name": "look", "strict": True, "parameters": {"type": "object", "properties": {}}},
    {"type": "web_search"},
]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": content}]}


def test_a_replayed_history_continues_the_stored_tokens_after_tools(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        engine = await found.worker("polly")
        engine._engine = ParrotEngine(EngineSettings())
        known: Any = {"model": found.gateway.context.model_name, "tools": TOOLS, "store": False}
        talk: list[Any] = [user(told("Let me see.\n" + "\n".join(CALLS)))]
        key = f"{TOKENS.agent}/talk"
        async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key=key, max_retries=0) as client:
            first: Any = await client.responses.create(input=talk, instructions="You help.", **known)
            kinds = [item.type for item in first.output]
            assert (first.status, kinds) == ("completed", ["message", "function_call", "function_call"])
            assert first.output_text == "Let me see." and json.loads(first.output[1].arguments) == {"where": "north"}

            async with client.responses.stream(input=talk, instructions="You help.", **known) as stream:
                events = [event async for event in stream]
                final: Any = await stream.get_final_response()
            assert [item.type for item in final.output] == kinds and final.output_text == first.output_text
            assert [item.call_id for item in final.output[1:]] == [item.call_id for item in first.output[1:]]
            assert (events[0].type, events[1].type) == ("response.created", "response.in_progress")
            numbers = [event.sequence_number for event in events]  # of events that the server sent
            assert numbers == sorted(numbers) and numbers[0] == 0

            session = found.gateway.core.trajectories.get("talk")
            assert session is not None
            [turn] = session.turns
            held = [*turn.prompt_ids, *turn.produced.token_ids]
            talk += [item.model_dump(exclude_none=True) for item in final.output]
            talk += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "trees"}
                for item in final.output[1:]
            ]
            talk.append(user(told("done")))
            second: Any = await client.responses.create(input=talk, instructions="You help.", **known)
            assert second.output_text == "done" and not second.rose["is_fork"] and second.rose["turn"] == 1
            assert list(session.turns[1].prompt_ids[: len(held)]) == held, "only what is new was tokenised"
            assert second.usage.input_tokens == len(session.turns[1].prompt_ids)

            changed = [*talk[:2], {**talk[2], "arguments": '{"where": "west"}'}, *talk[3:]]
            other: Any = await client.responses.create(input=changed, instructions="You help.", **known)
            assert other.rose["is_fork"]

    tell(folder, story)


def test_a_response_that_no_worker_gives_is_503(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        body = {"model": found.gateway.context.model_name, "max_output_tokens": 4, "input": "hello"}
        status, reply = await found.ask("POST", "/v1/responses", body, session="s")
        assert status == 503 and reply["error"]["message"]

    tell(folder, story, wait_s=0.2)


def test_the_official_client_raises_an_error_that_comes_in_a_stream(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        wanted: Any = {"model": found.gateway.context.model_name, "input": "x", "max_output_tokens": 3000}
        async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key=TOKENS.agent, max_retries=0) as client:
            stream = await client.responses.create(**wanted, stream=True, extra_body={"ignore_eos": True})
            kinds = [(await anext(stream)).type for _ in range(5)]
            await found.stop("a")
            with pytest.raises(openai.APIError, match="no worker"):
                _ = [event async for event in stream]
        assert kinds[:2] == ["response.created", "response.in_progress"]

    tell(folder, story, wait_s=0.3)
