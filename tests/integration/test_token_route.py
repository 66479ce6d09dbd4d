"""Token ids in, token ids out, for trainers."""

from __future__ import annotations

import json
from typing import Any

from tests.integration.devices import Device

PATH = "/inference/v1/generate"
PROMPT = list(b"Once upon a time")
SAMPLING: dict[str, Any] = {"max_tokens": 12, "seed": 3, "logprobs": 1, "ignore_eos": True}


def generate(device: Device, **changes: Any) -> dict[str, Any]:
    answer = device.post(PATH, {"model": device.model, "token_ids": PROMPT, "sampling_params": SAMPLING} | changes)
    assert answer.status == 200, answer.body
    return answer.json


def test_the_reply_has_what_trainers_need(device: Device) -> None:
    reply = generate(device, request_id="turn-7")
    [choice] = reply["choices"]
    assert reply["request_id"] == "turn-7"
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 12
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token_id"] == token_id
        assert entry["token"] == f"token_id:{token_id}"
        assert entry["logprob"] < 0
        assert "top_logprobs" not in entry
    version = reply["weight_version"]
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 12}]


def test_the_same_tokens_as_the_completions_route(device: Device) -> None:
    completion = device.complete(
        prompt=PROMPT, max_tokens=12, seed=3, ignore_eos=True, return_token_ids=True, logprobs=0
    ).json["choices"][0]
    [choice] = generate(device)["choices"]
    assert completion["token_ids"] == choice["token_ids"]
    assert completion["prompt_token_ids"] == PROMPT
    assert completion["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in choice["logprobs"]["content"]]


def test_streamed_chunks_add_up(device: Device) -> None:
    whole = generate(device, request_id="whole")
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING, "stream": True, "stream_options": {"include_usage": True}}
    answer = device.ask("POST", PATH, body, headers={"X-Session-ID": "trajectory-1"})
    *data, done = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
    assert done == b"[DONE]"
    *chunks, usage = [json.loads(entry) for entry in data]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert choices[-1]["finish_reason"] == "length"
    assert choices[-1]["weight_versions"][0]["end"] == 12
    assert usage["usage"] == whole["usage"] | {"prompt_tokens_details": usage["usage"]["prompt_tokens_details"]}


def test_more_logprobs_bring_alternatives(device: Device) -> None:
    [choice] = generate(device, sampling_params=SAMPLING | {"logprobs": 4})["choices"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [4] * 12


def test_no_logprobs_unless_asked_for(device: Device) -> None:
    [choice] = generate(device, sampling_params={"max_tokens": 2})["choices"]
    assert choice["logprobs"] is None


def test_stop_token_ids_end_it_and_are_in_it(device: Device) -> None:
    free = generate(device)["choices"][0]["token_ids"]
    stop = free[5]
    [choice] = generate(device, sampling_params=SAMPLING | {"stop_token_ids": [stop]})["choices"]
    assert choice["token_ids"] == free[: free.index(stop) + 1]
    assert choice["finish_reason"] == "stop"
