"""From bodies to engine requests: prompts, sampling, seeds."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.front_world import FrontWorld, run_with_server

from rose.errors import ContextTooLong
from rose.models.model_folder import ModelFolder
from rose.openai.http_errors import Failure
from rose.openai.prompts import choices_of, prompts_of, sampling_of
from rose.openai.request_schemas import TEMPERATURE_MIN, CompletionBody

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    assert prompts_of(prompt) == expected


@pytest.mark.parametrize("prompt", [["x", 1], [[1], 1], [[1], "x"]])
def test_mixed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(Failure, match="mixes"):
        prompts_of(prompt)


def test_too_many_prompts_are_refused_before_any_is_tokenised(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: FrontWorld) -> None:
        for prompt, n in ((["a"] * 129, 1), (["a"] * 65, 2), ([[1]] * 129, 1)):
            status, answer = await world.post(COMPLETIONS, {"prompt": prompt, "n": n})
            assert status == 400 and "more than 128 choices" in answer["error"]["message"]

    def encode(*_: Any) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(folder.tokenizer, "encode", encode)
    monkeypatch.setattr(folder.tokenizer, "encode_many", encode)
    run_with_server(folder, story)


def test_seeds_differ_per_choice_and_can_be_had_again(folder: ModelFolder) -> None:
    async def story(world: FrontWorld) -> None:
        body = CompletionBody(prompt="x", n=3, seed=-2, stop="y", cache_salt="mine")
        choices = choices_of(world.front, body, [(1, 2)], reply_id="r", arrival_s=4.0)
        assert [choice.request.sampling.seed for choice in choices] == [2**63 - 2, 2**63 - 1, 0]
        assert [choice.request.request_id for choice in choices] == ["r-0", "r-1", "r-2"]
        assert choices[0].request.tenant == "mine" and choices[0].has_stop_strings
        unseeded = choices_of(world.front, CompletionBody(prompt="x", n=2), [(1,)], reply_id="r", arrival_s=4.0)
        assert len({choice.request.sampling.seed for choice in unseeded}) == 2

    run_with_server(folder, story)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, {"temperature": 1.0, "max_tokens": 16, "top_k": 0}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1e-9}, {"temperature": TEMPERATURE_MIN}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 1 << 20}, {"top_k": 0}),
        ({"logprobs": 3}, {"top_logprobs": 3}),
        ({"max_tokens": 60}, {"max_tokens": 60}),
    ],
)
def test_sampling_of_a_body(folder: ModelFolder, given: dict[str, Any], expected: dict[str, Any]) -> None:
    async def story(world: FrontWorld) -> None:
        sampling = sampling_of(world.front, CompletionBody(prompt="x", **given), 4)
        assert {name: getattr(sampling, name) for name in expected} == expected

    run_with_server(folder, story, context_tokens=64)


@pytest.mark.parametrize(
    "given, why", [({"max_tokens": 61}, "more than the context"), ({"max_tokens": 2, "min_tokens": 3}, "min_tokens")]
)
def test_impossible_lengths_are_refused(folder: ModelFolder, given: dict[str, Any], why: str) -> None:
    async def story(world: FrontWorld) -> None:
        with pytest.raises((Failure, ContextTooLong), match=why):
            sampling_of(world.front, CompletionBody(prompt="x", **given), 4)

    run_with_server(folder, story, context_tokens=64)
