"""Fields that trainers and agents send, and what each changes in the answer of a device."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.front_world import TOKEN, FrontWorld, run_with_server, stream_of
from tests.unit.openai.readers import LEAST, READERS, refused

from rose.api.requests import PROMPT_LOGPROBS_MAX
from rose.models.model_folder import ModelFolder

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
MESSAGES = [{"role": "user", "content": "x"}]
NAME = f"token_id:{TOKEN}"


def test_completions_name_tokens_by_id_and_count_offsets_in_text(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        body = {"prompt": [1], "max_tokens": 2, "logprobs": 2, "return_tokens_as_token_ids": True}
        [choice] = (await world.post(COMPLETIONS, body))[1]["choices"]
        [chunk] = await stream_of(world, COMPLETIONS, body | {"stream": True})
        for logprobs in (choice["logprobs"], chunk["choices"][0]["logprobs"]):
            assert logprobs["tokens"] == [NAME] * 2 and logprobs["text_offset"] == [0, 1]
            assert logprobs["top_logprobs"] == [{NAME: -1.0, f"token_id:{TOKEN + 1}": -2.0}] * 2

    run_with_server(folder, story)


def test_a_conversation_names_tokens_by_id_and_keeps_their_bytes(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
        [choice] = (await world.post(CHAT, body | {"return_tokens_as_token_ids": True}))[1]["choices"]
        [entry] = choice["logprobs"]["content"]
        assert (entry["token"], entry["bytes"]) == (NAME, [TOKEN])
        assert [best["token"] for best in entry["top_logprobs"]] == [NAME, f"token_id:{TOKEN + 1}"]

    run_with_server(folder, story)


@pytest.mark.parametrize("path, body", [(COMPLETIONS, {"prompt": [1]}), (CHAT, {"messages": MESSAGES})])
def test_weight_versions_come_when_asked_for_and_once_in_a_stream(
    folder: ModelFolder, path: str, body: dict[str, Any]
) -> None:
    async def story(world: FrontWorld) -> None:
        spans = [{"version": "v0", "start": 0, "end": 3}]
        asked = body | {"max_tokens": 3, "return_weight_versions": True}
        [choice] = (await world.post(path, asked))[1]["choices"]
        assert choice["weight_versions"] == spans and "token_ids" not in choice
        chunks = [chunk["choices"][0] for chunk in await stream_of(world, path, asked | {"stream": True})]
        assert [chunk.get("weight_versions") for chunk in chunks if "weight_versions" in chunk] == [spans]
        assert chunks[-1]["finish_reason"] == "length" and "weight_versions" in chunks[-1]
        [choice] = (await world.post(path, body | {"max_tokens": 3}))[1]["choices"]
        assert "weight_versions" not in choice

    run_with_server(folder, story)


@pytest.mark.parametrize("wanted, entries", [(True, 1), (False, 0), (None, 0), (0, 1), (1, 1)])
def test_logprobs_may_be_true_and_false(folder: ModelFolder, wanted: bool | int | None, entries: int) -> None:
    async def story(world: FrontWorld) -> None:
        body: dict[str, Any] = {"prompt": [1], "max_tokens": 1, "logprobs": wanted}
        [choice] = (await world.post(COMPLETIONS, body))[1]["choices"]
        assert len((choice["logprobs"] or {"tokens": []})["tokens"]) == entries
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "logprobs": wanted}}
        [choice] = (await world.post(GENERATE, body))[1]["choices"]
        assert len((choice["logprobs"] or {"content": []})["content"]) == entries

    run_with_server(folder, story)


@pytest.mark.parametrize("is_shown, text", [(True, "aaa"), (False, "a"), (None, "a")])
def test_a_stop_string_is_shown_if_asked_for(folder: ModelFolder, is_shown: bool | None, text: str) -> None:
    async def story(world: FrontWorld) -> None:
        body = {"prompt": "x", "stop": "aa", "min_tokens": 1, "include_stop_str_in_output": is_shown}
        [choice] = (await world.post(COMPLETIONS, body))[1]["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "aa")
        chunks = await stream_of(world, COMPLETIONS, body | {"stream": True})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text

    run_with_server(folder, story)


@pytest.mark.parametrize(
    "name, more",
    [
        ("sampling", {"routed_experts_prompt_start": 57}),
        ("sampling", {"include_stop_str_in_output": True, "stop": None}),
        ("generate", {"return_weight_versions": True}),
        ("chat", {"nvext": {"extra_fields": ["engine_data"]}}),
        ("completions", {"nvext": {}}),
    ],
)
def test_fields_that_change_nothing_are_accepted(name: str, more: dict[str, Any]) -> None:
    READERS[name].read(msgspec.json.encode(LEAST[name] | more))


@pytest.mark.parametrize(
    "name, more",
    [
        ("sampling", {"routed_experts_prompt_start": -1}),
        ("sampling", {"prompt_logprobs": 21}),
        ("completions", {"prompt_logprobs": -1}),
        ("completions", {"logprobs": 21}),
        ("chat", {"weight_version": "x" * 257}),
        ("chat", {"nvext": {"a": 1 << 2000}}),
        ("chat", {"nvext": 7}),
    ],
)
def test_fields_beyond_their_bounds_are_refused(name: str, more: dict[str, Any]) -> None:
    assert refused(name, **more).status == 400


@pytest.mark.parametrize(
    "path, body",
    [
        (COMPLETIONS, {"prompt": [1, 2], "prompt_logprobs": 1}),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1}),
        (GENERATE, {"token_ids": [1, 2], "sampling_params": {"prompt_logprobs": 1}}),
    ],
)
def test_an_engine_without_prompt_logprobs_is_named_in_a_refusal(
    folder: ModelFolder, path: str, body: dict[str, Any]
) -> None:
    async def story(world: FrontWorld) -> None:
        status, answer = await world.post(path, body)
        assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
        assert "does not compute" in answer["error"]["message"]
        status, answer = await world.post(path, body | {"stream": True})
        assert status == 400 and "stream" in answer["error"]["message"]

    run_with_server(folder, story)


def test_a_response_with_too_many_entries_of_prompts_is_refused(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        prompt = [1] * (PROMPT_LOGPROBS_MAX // 21 + 1)
        for body in ({"prompt": prompt, "prompt_logprobs": 20}, {"prompt": prompt, "prompt_logprobs": 0, "n": 22}):
            status, answer = await world.post(COMPLETIONS, body)
            assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")
        assert not world.engine.requests

    run_with_server(folder, story, context_tokens=1 << 20)


@pytest.mark.parametrize("field", ["weight_version", "min_weight_version"])
def test_a_device_answers_only_for_the_weights_that_it_runs(folder: ModelFolder, field: str) -> None:
    async def story(world: FrontWorld) -> None:
        for path, body in ((COMPLETIONS, {"prompt": [1]}), (GENERATE, {"token_ids": [1]})):
            assert (await world.post(path, body | {field: "v0"}))[0] == 200
            status, answer = await world.post(path, body | {field: "v1"})
            assert (status, answer["weight_version"], answer["error"]["code"]) == (409, "v0", "version_unavailable")

    run_with_server(folder, story)
