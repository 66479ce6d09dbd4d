"""`POST /v1/completions`: prompts as text or token ids, whole or as a stream."""

from __future__ import annotations

import pytest
from tests.unit.front_world import FrontWorld, run_with_server, stream_of

from rose.models.model_folder import ModelFolder

COMPLETIONS = "/v1/completions"


def test_every_prompt_gets_its_choices_in_order(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        status, answer = await world.post(COMPLETIONS, {"prompt": [[1], [2, 3]], "n": 2, "max_tokens": 4})
        assert status == 200 and [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [request.prompt_ids for request in world.engine.requests] == [(1,), (1,), (2, 3), (2, 3)]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 16)

    run_with_server(folder, story)


def test_a_completion_has_sixteen_tokens_unless_the_client_says(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        assert (await world.post(COMPLETIONS, {"prompt": "x"}))[1]["choices"][0]["text"] == "a" * 16
        status, answer = await world.post(COMPLETIONS, {"prompt": "x", "max_tokens": 64})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    run_with_server(folder, story, context_tokens=32)


def test_logprobs_of_a_stream_go_on_where_the_last_chunk_ended(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        body = {"prompt": [1], "max_tokens": 3, "logprobs": 2, "stream": True, "return_token_ids": True}
        [chunk] = await stream_of(world, COMPLETIONS, body)
        [choice] = chunk["choices"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2] and choice["prompt_token_ids"] == [1]
        assert choice["logprobs"]["top_logprobs"][0].keys() == {"a", "b"}
        assert choice["finish_reason"] == "length" and chunk["rose"] == {"workers": ["w"]}

    run_with_server(folder, story)


@pytest.mark.parametrize("stop", ["aa", ["b", "aa"]])
def test_a_stop_string_ends_the_text_and_is_not_shown(folder: ModelFolder, stop: str | list[str]) -> None:
    async def story(world: FrontWorld) -> None:
        [choice] = (await world.post(COMPLETIONS, {"prompt": "x", "stop": stop, "min_tokens": 1}))[1]["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", "aa")

    run_with_server(folder, story)
