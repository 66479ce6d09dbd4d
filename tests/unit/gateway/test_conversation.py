"""Conversations at the gateway continue from the ids of earlier turns, exactly.

The echo engine answers with a text that is written into the message.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.parrot import ParrotEngine, told
from tests.unit.rollout_world import CHAT, COMPLETIONS, World, tell

from rose.config.server_settings import EngineSettings
from rose.models.model_folder import ModelFolder

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'


async def parrot(found: World) -> None:
    engine = await found.worker("polly")
    engine._engine = ParrotEngine(EngineSettings())


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def told_in_chunks(found: World, path: str, body: dict[str, Any], session: str | None = None) -> list[Any]:
    status, data = await found.ask("POST", path, body | {"stream": True}, session=session)
    assert status == 200, data
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_conversation_with_a_stop_string(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")

        async def say(messages: list[Any], **more: Any) -> Any:
            body = {"messages": messages, "return_token_ids": True, "max_tokens": 30} | more
            status, reply = await found.ask("POST", "/v1/chat/completions", body, session="talk")
            assert status == 200, reply
            return reply

        opening = [{"role": "user", "content": "hello"}]
        free = await say(opening)
        text = free["choices"][0]["message"]["content"]
        cut = await say(opening, stop=text[2:4])
        assert cut["choices"][0]["message"]["content"] == text[:2] and cut["choices"][0]["finish_reason"] == "stop"
        held = [*cut["prompt_token_ids"], *cut["choices"][0]["token_ids"]]
        assert len(held) < len(free["prompt_token_ids"]) + 30
        more = [*opening, cut["choices"][0]["message"], {"role": "user", "content": "and?"}]
        assert (await say(more))["prompt_token_ids"][: len(held)] == held
        session = found.gateway.core.trajectories.get("talk")
        assert session is not None and len(session.turns) == 3 and not any(turn.is_running for turn in session.turns)

    tell(folder, story)


@pytest.mark.parametrize("more", [
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maximum": 2**70}}}]},
    {"messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 18446744073709551616}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]},
])  # fmt: skip
def test_large_integers_in_a_conversation_get_equal_answers(
    folder: ModelFolder, tmp_path: Path, more: dict[str, Any]
) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4} | more
        for _ in range(2):
            async with asyncio.timeout(20):
                status, reply = await found.ask("POST", "/v1/chat/completions", body, session="s")
            assert status == 200, reply

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


def test_an_integer_of_thousands_of_digits_in_a_call_is_a_400(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1' + "0" * 6000 + "}"}}
        messages = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "done"},
        ]
        for _ in range(2):
            status, _ = await found.ask("POST", "/v1/chat/completions", {"messages": messages}, session="s")
            assert status == 400

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


def test_a_tool_call_is_parsed_and_the_trajectory_stays_exact(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await parrot(found)
        said = f"Let me see.\n{CALL}"

        async def say(messages: list[Any], **more: Any) -> Any:
            body = {"messages": messages, "tools": TOOLS, "return_token_ids": True} | more
            status, reply = await found.ask("POST", CHAT, body, session="talk")
            assert status == 200, reply
            return reply

        opening = [user(told(said))]
        first = await say(opening)
        [choice] = first["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
        assert call["function"] == {"name": "look", "arguments": '{"where": "north"}'} and call["type"] == "function"
        assert (await say(opening))["choices"] == first["choices"], "asked again it is the same, ids of calls and all"

        held = [*first["prompt_token_ids"], *choice["token_ids"]]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "trees"}
        more = [*opening, choice["message"], result, user(told("done"))]
        second = await say(more)
        assert second["prompt_token_ids"][: len(held)] == held and not second["rose"]["is_fork"]
        text = bytes(token for token in second["prompt_token_ids"][len(held) :] if token < 256).decode()
        assert "trees" in text and "look" not in text, "only what is new was tokenised"
        assert second["choices"][0]["message"] == {"role": "assistant", "content": "done", "refusal": None}
        assert second["choices"][0]["finish_reason"] == "stop"

        respelt = json.loads(json.dumps(more))
        respelt[1] |= {"content": "Let me see.", "tool_calls": [call | {"id": None, "index": 0}]}
        respelt[1]["tool_calls"][0]["function"] = {"name": "look", "arguments": '{"where":"north"}'}
        assert (await say(respelt))["rose"]["turn"] == 1, "the same call, spelt otherwise"

        respelt[1]["tool_calls"][0]["function"]["arguments"] = '{"where": "south"}'
        assert (await say(respelt))["rose"] | {"workers": []} == {
            "workers": [], "trajectory": "talk", "turn": 2, "is_fork": True,
        }  # fmt: skip
        other = [{"type": "function", "function": {"name": "go"}}]
        assert (await say(more, tools=other))["rose"]["is_fork"], "the prompt of that turn had other tools"
        assert (await found.ask("POST", "/v1/trajectories/talk/finish", {}))[1] == {
            "id": "talk",
            "turns": 4,
            "forks": 2,
        }

    tell(folder, story)


def test_an_answer_that_was_not_noted_is_known_by_its_ids(folder: ModelFolder) -> None:
    """As when the gateway died between the answer and the note of it, and has its books from the ledger."""

    async def story(found: World) -> None:
        await parrot(found)
        body: dict[str, Any] = {"messages": [user(told(f"Hm. {CALL}"))], "tools": TOOLS}
        _, first = await found.ask("POST", CHAT, body, session="s")
        session = found.gateway.core.trajectories.get("s")
        assert session is not None and session.turns[0].messages is not None
        session.turns[0].restore_messages(session.turns[0].messages, None)
        result = {"role": "tool", "tool_call_id": "x", "content": told("fine")}
        body["messages"] += [first["choices"][0]["message"], result]
        _, second = await found.ask("POST", CHAT, body, session="s")
        assert second["rose"]["turn"] == 1 and not second["rose"]["is_fork"]
        assert second["choices"][0]["message"]["content"] == "fine"

    tell(folder, story)


def test_a_plain_prompt_continues_from_the_ids_before(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await parrot(found)

        async def complete(prompt: Any, **more: Any) -> Any:
            body = {"prompt": prompt, "max_tokens": 40, "return_token_ids": True, "logprobs": 0} | more
            status, reply = await found.ask("POST", COMPLETIONS, body, session="s")
            assert status == 200, reply
            return reply["choices"][0] | {"rose": reply["rose"]}

        prompt = told("abc\ufffd") + "!"
        first = await complete(prompt)
        assert first["text"] == "abc\ufffd" and first["finish_reason"] == "stop"
        assert len(first["logprobs"]["token_logprobs"]) == len(first["token_ids"])
        held = [*first["prompt_token_ids"], *first["token_ids"]]
        second = await complete(f"{prompt}{first['text']} and {told('more')}")
        assert second["prompt_token_ids"][: len(held)] == held and second["text"] == "more"
        assert second["rose"]["turn"] == 1 and second["rose"]["trajectory"] == "s"
        by_ids = await complete(second["prompt_token_ids"])
        assert by_ids["token_ids"] == second["token_ids"] and by_ids["rose"]["turn"] == 1, "known by its ids"
        third = await complete(f"{prompt}{first['text']} and {told('more')}more {told('still')}")
        assert third["rose"]["turn"] == 2 and not third["rose"]["is_fork"] and third["text"] == "still"
        chunks = await told_in_chunks(found, COMPLETIONS, {"prompt": prompt, "max_tokens": 40}, "s")
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == first["text"]
        assert found.gateway.core.scheduler.counts.begun == 3
        for wrong, param in (({"n": 2}, "n"), ({"prompt": ["a", "b"]}, "prompt")):
            status, reply = await found.ask("POST", COMPLETIONS, {"prompt": "x"} | wrong, session="s")
            assert (status, reply["error"]["param"]) == (400, param)

    tell(folder, story)
