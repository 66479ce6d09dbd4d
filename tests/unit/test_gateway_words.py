"""Turns in words at the gateway: conversations, tools, plain prompts, names of trajectories, and who may do what.

The engine is a parrot: what "the model" answers is written into the message that it answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tests.e2e.parrot import ParrotEngine, told
from tests.unit.rollout_world import TOKENS, World, eventually, world

from rose.config.device import EngineSettings
from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.rollout.messages import CONNECT_PATH

Story = Callable[[World], Awaitable[None]]
PROMPT = [1, 2, 3]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0))


def tell(folder: ModelFolder, story: Story, **changes: Any) -> None:
    async def whole() -> None:
        async with world(folder, **changes) as found:
            await story(found)

    asyncio.run(whole())


async def parrot(found: World) -> None:
    engine = await found.worker("polly")
    engine._engine = ParrotEngine(EngineSettings())


async def told_in_chunks(found: World, path: str, body: dict[str, Any], session: str | None = None) -> list[Any]:
    status, data = await found.ask("POST", path, body | {"stream": True}, session=session)
    assert status == 200, data
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_call_of_a_tool_comes_apart_from_the_text_and_the_trajectory_stays_exact(folder: ModelFolder) -> None:
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
        session = found.gateway.trajectories.get("s")
        assert session is not None and session.turns[0].messages is not None
        session.turns[0].restore_words(session.turns[0].messages, None)
        result = {"role": "tool", "tool_call_id": "x", "content": told("fine")}
        body["messages"] += [first["choices"][0]["message"], result]
        _, second = await found.ask("POST", CHAT, body, session="s")
        assert second["rose"]["turn"] == 1 and not second["rose"]["is_fork"]
        assert second["choices"][0]["message"]["content"] == "fine"

    tell(folder, story)


@pytest.mark.parametrize("session", ["s", None])
def test_calls_stream_in_openais_shape(folder: ModelFolder, session: str | None) -> None:
    async def story(found: World) -> None:
        await parrot(found)
        body = {"messages": [user(told(f"First {CALL}\n{CALL} <tool_call>oops</tool_call>"))], "tools": TOOLS}
        chunks = await told_in_chunks(found, CHAT, body | {"return_token_ids": True, "logprobs": True}, session)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2
        assert all(call["function"] == {"name": "look", "arguments": '{"where": "north"}'} for call in calls)
        words = "".join(delta.get("content") or "" for delta in deltas)
        assert words == "First <tool_call>oops</tool_call>", "what is no call stays text"
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"
        ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
        _, whole = await found.ask("POST", CHAT, body | {"return_token_ids": True}, session=session)
        assert whole["choices"][0]["token_ids"] == ids and whole["choices"][0]["message"]["content"] == words
        assert sum(len(c["choices"][0]["logprobs"]["content"]) for c in chunks if c["choices"][0]["logprobs"]) == len(
            ids
        )

    tell(folder, story)


@pytest.mark.parametrize("how", ["by the request", "by the setting"])
def test_calls_stay_text_when_somebody_says_so(folder: ModelFolder, how: str) -> None:
    async def story(found: World) -> None:
        await parrot(found)
        body = {"messages": [user(told(CALL))], "tools": TOOLS}
        if how == "by the request":
            body["tool_choice"] = "none"
        _, reply = await found.ask("POST", CHAT, body, session="s")
        message = reply["choices"][0]["message"]
        assert message["content"] == CALL and "tool_calls" not in message
        assert reply["choices"][0]["finish_reason"] == "stop"
        body["messages"] += [message, user("and?")]
        _, again = await found.ask("POST", CHAT, body | {"max_tokens": 3}, session="s")
        assert again["rose"]["turn"] == 1 and not again["rose"]["is_fork"]

    tell(folder, story, tool_parser="hermes" if how == "by the request" else "text")


def test_a_template_without_a_place_for_tools_says_so(tmp_path: Path) -> None:
    path = write_preset("qwen3-3m", tmp_path / "qwen3-3m", seed=0)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")

    async def story(found: World) -> None:
        await parrot(found)
        status, reply = await found.ask("POST", CHAT, {"messages": [user("x")], "tools": TOOLS}, session="s")
        assert status == 400 and reply["error"]["param"] == "tools" and "no place" in reply["error"]["message"]
        assert (await found.ask("POST", CHAT, {"messages": [user(told("x"))], "tools": []}))[0] == 200

    tell(load_model_folder(path), story)


def test_a_plain_prompt_goes_on_from_the_ids_of_the_one_before(folder: ModelFolder) -> None:
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
        assert found.gateway.scheduler.counts.begun == 3
        for wrong, param in (({"n": 2}, "n"), ({"prompt": ["a", "b"]}, "prompt")):
            status, reply = await found.ask("POST", COMPLETIONS, {"prompt": "x"} | wrong, session="s")
            assert (status, reply["error"]["param"]) == (400, param)

    tell(folder, story)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/inference/v1/generate"])
def test_a_trajectory_has_one_name_wherever_it_is_written(folder: ModelFolder, path: str) -> None:
    asked: dict[str, Any] = {
        CHAT: {"messages": [user("x")], "max_tokens": 4},
        COMPLETIONS: {"prompt": "x", "max_tokens": 4},
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}},
    }[path]

    async def story(found: World) -> None:
        await found.worker("a")
        replies = [
            await found.ask("POST", path, asked, session="s"),
            await found.ask("POST", path, asked | {"program_id": "s"}),
            await found.ask("POST", path, asked | {"trajectory": "s"}),
            await found.ask("POST", path, asked | {"trajectory": "s", "program_id": "s"}, session="s"),
        ]
        assert [status for status, _ in replies] == [200] * 4
        assert {(reply["rose"]["trajectory"], reply["rose"]["turn"]) for _, reply in replies} == {("s", 0)}
        assert found.gateway.scheduler.counts.begun == 1, "one turn, asked for four times"
        for twice in ({"program_id": "t"}, {"trajectory": "t"}):
            status, reply = await found.ask("POST", path, asked | twice, session="s")
            words = reply["error"]["message"]
            assert status == 400 and reply["error"]["param"] == next(iter(twice))
            assert all(part in words for part in ("`s` in X-Session-ID", f"`t` in {next(iter(twice))}"))
        assert (await found.ask("POST", path, asked | {"trajectory": "t", "program_id": "u"}))[0] == 400
        assert (await found.ask("POST", path, asked | {"trajectory": ""}))[0] == 400
        assert len(found.gateway.trajectories) == 1

    tell(folder, story)


def test_a_refused_turn_opens_no_trajectory(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        assert await found.refused([10**6], "s") == 400
        assert (await found.ask("POST", CHAT, {"messages": [user("x")], "n": 2}, session="s"))[0] == 400
        assert (await found.ask("POST", COMPLETIONS, {"prompt": "x", "model": "other"}, session="s"))[0] == 404
        assert len(found.gateway.trajectories) == 0

    tell(folder, story)


def test_replies_say_which_weights_drew_which_tokens(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        body = {"messages": [user("x")], "max_tokens": 100, "return_token_ids": True}
        chat = asyncio.create_task(told_in_chunks(found, CHAT, body, "chat"))
        plain = {"prompt": "x", "max_tokens": 100, "return_token_ids": True}
        completion = asyncio.create_task(found.ask("POST", COMPLETIONS, plain, session="plain"))
        await eventually(lambda: found.gateway.scheduler.counts.tokens > 20)
        published = {"version": "v1", "folder": str(folder.path), "wait_s": 20}
        assert (await found.ask("POST", "/v1/versions", published))[0] == 200
        [whole] = (await completion)[1]["choices"]
        assert [span["version"] for span in whole["weight_versions"]] == ["v0", "v1"]
        assert (whole["weight_versions"][0]["start"], whole["weight_versions"][1]["end"]) == (0, 100)
        spans = [span for chunk in await chat for span in chunk["choices"][0].get("weight_versions", [])]
        assert list(dict.fromkeys(span["version"] for span in spans)) == ["v0", "v1"]
        assert [span["start"] for span in spans[1:]] == [span["end"] for span in spans[:-1]] and spans[-1]["end"] == 100

    tell(folder, story)


@pytest.mark.parametrize("session", ["s", None])
def test_replies_say_where_a_turn_ran(folder: ModelFolder, session: str | None) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        body = {"messages": [user("x")], "max_tokens": 200, "ignore_eos": True}
        turn = asyncio.create_task(found.ask("POST", CHAT, body, session=session))
        stream = asyncio.create_task(told_in_chunks(found, CHAT, body | {"seed": 1}, session))
        await eventually(lambda: found.gateway.scheduler.counts.tokens > 20)
        await found.worker("b")
        await found.stop("a")
        assert (await turn)[1]["rose"]["workers"] == ["a", "b"]
        chunks = await stream
        assert chunks[-1]["rose"]["workers"] == ["a", "b"] and all("rose" not in chunk for chunk in chunks[:-1])
        _, again = await found.ask("POST", COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4}, session=session)
        assert again["rose"]["workers"] == ["b"]
        ids = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
        _, tokens = await found.ask("POST", "/inference/v1/generate", ids, session=session)
        assert tokens["rose"]["workers"] == ["b"]

    tell(folder, story)


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v1/pool", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/models", 200),
        ("POST", "/v1/pool/a/drain", 200),
        ("POST", "/inference/v1/generate", 403),
        ("POST", CHAT, 403),
        ("POST", "/v1/trajectories", 403),
        ("POST", "/v1/trajectories/t/finish", 403),
        ("GET", "/v1/batches/next", 403),
        ("POST", "/v1/versions", 403),
        ("GET", CONNECT_PATH, 403),
    ],
)
def test_an_operator_looks_and_sends_workers_away(folder: ModelFolder, method: str, path: str, status: int) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        body = {} if method == "POST" else None
        found_status, reply = await found.ask(method, path, body, token=TOKENS.operator)
        assert found_status == status, reply
        if status == 403:
            assert "operator" in reply["error"]["message"]

    tell(folder, story)


@pytest.mark.parametrize("token", [TOKENS.agent, TOKENS.worker, ""])
def test_only_trainers_and_operators_send_workers_away(folder: ModelFolder, token: str) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        assert (await found.ask("POST", "/v1/pool/a/drain", {}, token=token))[0] == (403 if token else 401)
        assert (await found.ask("POST", "/v1/pool/a/drain", {}, token=TOKENS.trainer))[0] == 200

    tell(folder, story)


def test_the_openai_client_calls_a_tool_and_gives_it_its_result(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await parrot(found)
        parameters = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
        function = {"name": "look", "strict": True, "parameters": parameters | {"additionalProperties": False}}
        known: Any = {"model": "qwen3-3m", "tools": [{"type": "function", "function": function}]}
        known["extra_headers"] = {"X-Session-ID": "openai"}
        messages: list[Any] = [user(told(f"Hm. {CALL}"))]
        async with openai.AsyncOpenAI(base_url=f"{found.url}/v1", api_key=TOKENS.agent, max_retries=0) as client:
            whole = (await client.chat.completions.create(messages=messages, **known)).choices[0]
            assert whole.finish_reason == "tool_calls" and whole.message.content == "Hm."
            async with client.chat.completions.stream(messages=messages, **known) as stream:
                final = (await stream.get_final_completion()).choices[0]
            assert final.finish_reason == "tool_calls" and final.message.content == "Hm."
            assert whole.message.tool_calls and final.message.tool_calls
            [call], [streamed] = whole.message.tool_calls, final.message.tool_calls
            assert isinstance(call, ChatCompletionMessageFunctionToolCall)
            assert (call.id, call.function.name) == (streamed.id, streamed.function.name)
            assert json.loads(call.function.arguments) == json.loads(streamed.function.arguments) == {"where": "north"}
            messages += [whole.message, {"role": "tool", "tool_call_id": call.id, "content": "trees"}]
            after: Any = await client.chat.completions.create(messages=messages, max_tokens=4, **known)
        assert after.rose["turn"] == 1 and not after.rose["is_fork"]
        assert found.gateway.scheduler.counts.begun == 2

    tell(folder, story)
