"""The generating routes of the gateway: tools, names of trajectories, priorities, and what replies report."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from tests.integration.parrot import ParrotEngine, told
from tests.unit.hostile_worker import hostile
from tests.unit.rollout_world import CHAT, COMPLETIONS, PROMPT, TOKENS, World, eventually, scripted, tell

from rose.api.worker_messages import (
    TokensAdded,
)
from rose.api.worker_messages import TurnTokens as PieceOf
from rose.config.server_settings import EngineSettings
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"where": "north"}}\n</tool_call>'


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


def test_requests_without_a_session_are_answered_as_by_a_device(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        assert (await found.turn(PROMPT, max_tokens=5))["token_ids"] == scripted(PROMPT, 5)
        body = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, "n": 2}
        status, reply = await found.ask("POST", "/v1/completions", body)
        assert status == 200 and [c["token_ids"] for c in reply["choices"]] == [scripted(PROMPT, 5)] * 2
        assert len(found.gateway.core.trajectories) == 0

    tell(folder, story)


def test_a_session_name_that_is_not_text_is_400(folder: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    async def story(found: World) -> None:
        host = found.url.removeprefix("http://")
        body = b'{"token_ids": [1], "sampling_params": {}}'
        head = (
            f"POST /inference/v1/generate HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKENS.agent}\r\n"
            f"Content-Type: application/json\r\nX-Session-ID: \xff\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(*host.split(":"))
        writer.write(head.encode("latin-1") + body)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        assert not caplog.records and len(found.gateway.core.trajectories) == 0

    tell(folder, story)


def test_an_agent_cannot_push_its_turns_before_others(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        worker = await hostile(found)
        for token, wanted in ((TOKENS.agent, 0), (TOKENS.trainer, -5)):
            body = {"token_ids": [wanted + 9], "sampling_params": {"max_tokens": 3}, "priority": -5}
            asking = asyncio.create_task(
                found.ask("POST", "/inference/v1/generate", body, session=f"s{wanted}", token=token)
            )
            turn = await worker.turn()
            assert turn.request.priority == wanted
            await worker.say(TokensAdded((PieceOf(turn.attempt_id, (1, 2, 3), (-1.0,) * 3, "v0", "length"),)))
            assert (await asking)[0] == 200

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
def test_calls_stay_text_by_request_or_setting(folder: ModelFolder, how: str) -> None:
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


def test_a_template_without_tools_is_reported(tmp_path: Path) -> None:
    path = write_preset("qwen3-3m", tmp_path / "qwen3-3m", seed=0)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")

    async def story(found: World) -> None:
        await parrot(found)
        status, reply = await found.ask("POST", CHAT, {"messages": [user("x")], "tools": TOOLS}, session="s")
        assert status == 400 and reply["error"]["param"] == "tools" and "no place" in reply["error"]["message"]
        assert (await found.ask("POST", CHAT, {"messages": [user(told("x"))], "tools": []}))[0] == 200

    tell(load_model_folder(path), story)


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
        assert found.gateway.core.scheduler.counts.begun == 1, "one turn, asked for four times"
        for twice in ({"program_id": "t"}, {"trajectory": "t"}):
            status, reply = await found.ask("POST", path, asked | twice, session="s")
            words = reply["error"]["message"]
            assert status == 400 and reply["error"]["param"] == next(iter(twice))
            assert all(part in words for part in ("`s` in X-Session-ID", f"`t` in {next(iter(twice))}"))
        assert (await found.ask("POST", path, asked | {"trajectory": "t", "program_id": "u"}))[0] == 400
        assert (await found.ask("POST", path, asked | {"trajectory": ""}))[0] == 400
        assert len(found.gateway.core.trajectories) == 1

    tell(folder, story)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/inference/v1/generate"])
def test_a_session_may_be_named_by_the_path_and_by_the_key(folder: ModelFolder, path: str) -> None:
    asked: dict[str, Any] = {
        CHAT: {"messages": [user("x")], "max_tokens": 4},
        COMPLETIONS: {"prompt": "x", "max_tokens": 4},
        "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}},
    }[path]

    async def story(found: World) -> None:
        await found.worker("a")
        replies = [
            await found.ask("POST", path, asked, session="a/b c", token=TOKENS.agent),
            await found.ask("POST", f"/sessions/a%2Fb%20c{path}", asked, token=TOKENS.agent),
            await found.ask("POST", path, asked, token=f"{TOKENS.agent}/a/b c"),
            await found.ask("POST", f"/sessions/a%2Fb%20c{path}", asked, token=f"{TOKENS.trainer}/a/b c"),
        ]
        assert {(status, reply["rose"]["trajectory"], reply["rose"]["turn"]) for status, reply in replies} == {
            (200, "a/b c", 0)
        }
        assert found.gateway.core.scheduler.counts.begun == 1, "one turn, asked for four times"
        for place, token in ((f"/sessions/t{path}", f"{TOKENS.agent}/s"), (f"/sessions/t{path}", TOKENS.agent)):
            status, reply = await found.ask("POST", place, asked | {"trajectory": "u"}, token=token)
            assert status == 400 and "not to" in reply["error"]["message"]
        for place, token in ((f"/sessions/{'x' * 322}{path}", TOKENS.agent), (path, f"{TOKENS.agent}/{'x' * 322}")):
            status, reply = await found.ask("POST", place, asked, token=token)
            assert status == 400 and "321 characters" in reply["error"]["message"]
        assert (await found.ask("POST", f"/sessions/%01{path}", asked))[0] == 400
        assert (await found.ask("POST", f"/sessions{path}", asked))[0] == 404
        assert len(found.gateway.core.trajectories) == 1

    tell(folder, story)


def test_a_trajectory_that_was_begun_needs_its_secret_in_path_and_key_too(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        _, begun = await found.ask("POST", "/v1/trajectories", {"id": "mine"}, token=TOKENS.agent)
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
        route = "/inference/v1/generate"
        for name, status in ((begun["session"], 200), ("mine", 403), ("mine." + "x" * 24, 403)):
            assert (await found.ask("POST", f"/sessions/{name}{route}", body, token=TOKENS.agent))[0] == status
            assert (await found.ask("POST", route, body, token=f"{TOKENS.agent}/{name}"))[0] == status
        assert (await found.ask("POST", route, body, token=f"{TOKENS.trainer}/mine"))[0] == 200

    tell(folder, story)


def test_a_key_with_a_session_is_a_key_for_the_other_routes_of_its_role(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        for path in ("/v1/models", "/sessions/s/v1/models", "/sessions/s/v1/models/" + folder.name, "/v1/pool"):
            assert (await found.ask("GET", path, token=f"{TOKENS.agent}/s"))[0] == 200
        assert (await found.ask("POST", "/sessions/s/tokenize", {"prompt": "x"}, token=TOKENS.agent))[0] == 200
        assert (await found.ask("GET", "/v1/batches/next?groups=1", token=f"{TOKENS.agent}/s"))[0] == 403
        for token in (f"{TOKENS.operator}/s", f"{TOKENS.worker}/s", "/s", f"{TOKENS.agent}x/s"):
            assert (await found.ask("GET", "/v1/models", token=token))[0] == 401

    tell(folder, story)


def test_a_demand_for_weights_waits_and_then_is_409_with_the_newest(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        bodies: dict[str, Any] = {
            "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}},
            CHAT: {"messages": [user("x")], "max_tokens": 4},
            COMPLETIONS: {"prompt": "x", "max_tokens": 4},
        }
        for path, body in bodies.items():
            for session in (None, "s"):
                status, reply = await found.ask("POST", path, body | {"weight_version": "v7"}, session=session)
                assert (status, reply["weight_version"], reply["error"]["code"]) == (409, "0", "version_unavailable")
                assert (await found.ask("POST", path, body | {"weight_version": "v0"}, session=session))[0] == 200
        route, body = next(iter(bodies.items()))
        later = asyncio.create_task(found.ask("POST", route, body | {"min_weight_version": "v1"}, session="later"))
        await eventually(lambda: found.gateway.core.scheduler.waiting == 1)
        published = {"version": "v1", "folder": str(folder.path), "wait_s": 20}
        assert (await found.ask("POST", "/v1/versions", published))[0] == 200
        status, reply = await later
        assert status == 200 and {span["version"] for span in reply["choices"][0]["weight_versions"]} == {"v1"}
        status, reply = await found.ask("POST", route, body | {"weight_version": "v0"})
        assert (status, reply["weight_version"]) == (409, "v1")
        status, reply = await found.ask("POST", route, body | {"min_weight_version": "v1"}, session="later")
        assert status == 200 and reply["rose"]["turn"] == 0, "the same request is the same turn"

    tell(folder, story, version_wait_s=0.3)


@pytest.mark.parametrize("session", ["s", None])
def test_log_probabilities_of_a_prompt_come_through_the_pool(folder: ModelFolder, session: str | None) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "prompt_logprobs": 1}}
        expected = [None, *({str(token): SCORED, "0": BEST} for token in (6, 7))]
        for _ in range(2):  # the second is a repetition in a session
            status, reply = await found.ask("POST", "/inference/v1/generate", body, session=session)
            assert status == 200 and reply["prompt_logprobs"] == expected
        status, reply = await found.ask("POST", COMPLETIONS, {"prompt": [5, 6], "prompt_logprobs": 0}, session=session)
        scored = {"6": SCORED | {"decoded_token": "\x06"}}
        assert status == 200 and reply["choices"][0]["prompt_logprobs"] == [None, scored]

    tell(folder, story)


SCORED = {"logprob": -1.0, "rank": 1, "decoded_token": None}  # by the scripted engine
BEST = {"logprob": -1.0, "rank": 1, "decoded_token": None}


def test_a_refused_turn_opens_no_trajectory(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        assert await found.refused([10**6], "s") == 400
        assert (await found.ask("POST", CHAT, {"messages": [user("x")], "n": 2}, session="s"))[0] == 400
        assert (await found.ask("POST", COMPLETIONS, {"prompt": "x", "model": "other"}, session="s"))[0] == 404
        assert len(found.gateway.core.trajectories) == 0

    tell(folder, story)


def test_replies_name_the_version_of_each_token(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        body = {"messages": [user("x")], "max_tokens": 100, "return_token_ids": True}
        chat = asyncio.create_task(told_in_chunks(found, CHAT, body, "chat"))
        plain = {"prompt": "x", "max_tokens": 100, "return_token_ids": True}
        completion = asyncio.create_task(found.ask("POST", COMPLETIONS, plain, session="plain"))
        await eventually(lambda: found.gateway.core.scheduler.counts.tokens > 20)
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
def test_replies_name_the_worker_of_a_turn(folder: ModelFolder, session: str | None) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        body = {"messages": [user("x")], "max_tokens": 200, "ignore_eos": True}
        turn = asyncio.create_task(found.ask("POST", CHAT, body, session=session))
        stream = asyncio.create_task(told_in_chunks(found, CHAT, body | {"seed": 1}, session))
        await eventually(lambda: found.gateway.core.scheduler.counts.tokens > 20)
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
        assert found.gateway.core.scheduler.counts.begun == 2

    tell(folder, story)


def test_messages_continue_the_stored_tokens_after_a_tools_result(folder: ModelFolder) -> None:
    """A client of Anthropic's API sends back what it got, from whole answers and from a stream."""
    path, tool = "/v1/messages", {"name": "look", "input_schema": {"type": "object", "properties": {}}}

    async def story(found: World) -> None:
        await parrot(found)
        model = found.gateway.context.model_name

        async def say(messages: list[Any], **more: Any) -> Any:
            body = {"model": model, "max_tokens": 99, "tools": [tool], "messages": messages} | more
            status, reply = await found.ask("POST", path, body, token=f"{TOKENS.agent}/talk")
            assert status == 200, reply
            return reply

        opening = [user(told(f"Let me see.\n{CALL}"))]
        first = await say(opening)
        text, call = first["content"]
        assert (first["stop_reason"], text) == ("tool_use", {"type": "text", "text": "Let me see."})
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"where": "north"})
        assert (await say(opening))["content"] == first["content"], "asked again it is the same, ids of calls and all"

        streamed = (await say(opening, stream=True)).decode()
        events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: ")]
        assert [event["content_block"] for event in events if event["type"] == "content_block_start"] == [
            {"type": "text", "text": ""},
            call | {"input": {}},
        ]
        assert "[DONE]" not in streamed and events[-2]["delta"]["stop_reason"] == "tool_use"

        session = found.gateway.core.trajectories.get("talk")
        assert session is not None
        [turn] = session.turns
        held = [*turn.prompt_ids, *turn.produced.token_ids]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "trees"}]}
        answer = {"role": "assistant", "content": first["content"]}
        talk = [*opening, answer, {"role": "user", "content": [result]}, user(told("done"))]
        second = await say(talk)
        assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "done"}], "end_turn")
        assert second["rose"] | {"workers": []} == {"workers": [], "trajectory": "talk", "turn": 1, "is_fork": False}
        assert list(session.turns[1].prompt_ids[: len(held)]) == held, "only what is new was tokenised"
        assert second["usage"]["input_tokens"] == len(session.turns[1].prompt_ids)

        changed = [*opening, answer | {"content": [text, call | {"input": {"where": "south"}}]}, *talk[2:]]
        assert (await say(changed))["rose"]["is_fork"]

    tell(folder, story)


def test_a_message_that_no_worker_takes_is_an_error_of_anthropics_kind(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        body = {"model": found.gateway.context.model_name, "max_tokens": 4, "messages": [user("hello")]}
        status, reply = await found.ask("POST", "/v1/messages", body, session="s")
        assert (status, reply["type"], reply["error"]["type"]) == (503, "error", "overloaded_error")

    tell(folder, story, wait_s=0.2)
