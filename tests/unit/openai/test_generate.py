"""`POST /inference/v1/generate`: token ids in and out, with the weight version of every token."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.front_world import FrontWorld, run_with_server, stream_of

from rose.models.model_folder import ModelFolder

GENERATE = "/inference/v1/generate"


def test_tokens_come_with_their_probabilities_and_version(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        params = {"max_tokens": 3, "logprobs": 1, "seed": 5}
        body = {"token_ids": [1, 2], "sampling_params": params, "request_id": "mine"}
        status, answer = await world.post(GENERATE, body)
        assert status == 200 and (answer["request_id"], answer["weight_version"]) == ("mine", "v0")
        [choice] = answer["choices"]
        assert choice["token_ids"] == [97] * 3 and choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 3}]
        sampled = {"token": "token_id:97", "token_id": 97, "logprob": -1.0}
        assert choice["logprobs"]["content"] == [sampled] * 3
        [request] = world.engine.requests
        assert (request.sampling.seed, request.sampling.top_logprobs) == (5, 0)

    run_with_server(folder, story)


def test_alternatives_are_listed_from_two_on(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "logprobs": 2}}
        [choice] = (await world.post(GENERATE, body))[1]["choices"]
        [entry] = choice["logprobs"]["content"]
        assert [best["token_id"] for best in entry["top_logprobs"]] == [97, 98]

    run_with_server(folder, story)


def test_a_stream_carries_the_spans_of_its_own_tokens(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 2}, "stream": True}
        [chunk] = await stream_of(world, GENERATE, body)
        [choice] = chunk["choices"]
        assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 2}]
        assert choice["logprobs"] is None and chunk["rose"] == {"workers": ["w"]}

    run_with_server(folder, story)


@pytest.mark.parametrize(
    "body, param",
    [
        ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"sampling_params": {"stop": "x"}}, "sampling_params.stop"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"token_ids": [1 << 30]}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
    ],
)
def test_wrong_sampling_and_tokens_are_refused_by_name(folder: ModelFolder, body: dict[str, Any], param: str) -> None:
    async def story(world: FrontWorld) -> None:
        status, answer = await world.post(GENERATE, {"token_ids": [1]} | body)
        assert (status, answer["error"]["param"]) == (400, param)

    run_with_server(folder, story)
