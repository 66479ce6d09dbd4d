"""Whatever comes in: a 4xx in OpenAI's shape with a reason, and the others go on."""

from __future__ import annotations

import gzip
import socket
from typing import Any

import pytest
from tests.integration.devices import HOST, Device

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USER = [{"role": "user", "content": "x"}]

BAD_BODIES: list[tuple[str, Any, str | None]] = [
    # route, body, the parameter that is named
    (COMPLETIONS, {}, None),
    (COMPLETIONS, [], None),
    (COMPLETIONS, "prompt", None),
    (COMPLETIONS, None, None),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": 7}, "prompt"),
    (COMPLETIONS, {"prompt": ["x", 7]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [264]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1, 2], [99999]]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": "x" * 9000}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x" * 2_000_000}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 8192}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "16"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 10**6}, "n"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 2}, "n"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": 1e300}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_p": 1.1}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, "top_k"),
    (COMPLETIONS, {"prompt": "x", "min_p": 2}, "min_p"),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "seed"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a", "b", "c", "d", "e"]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [5000]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_use": True}}, "stream_options.include_use"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    (
        COMPLETIONS,
        {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "echo": True}, "echo"),
    (COMPLETIONS, {"prompt": "x", "echo": 0}, "echo"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 10}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "max_tokns": 5}, "max_tokns"),
    (CHAT, {}, None),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, "max_tokens"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": USER, "max_completion_tokens": 8192}, "max_tokens"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0]"),
    (CHAT, {"messages": USER, "tools": [], "tool_choice": "required"}, "tool_choice"),
    (
        CHAT,
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": USER, "reasoning_effort": "high"}, "reasoning_effort"),
    (GENERATE, {"token_ids": []}, "token_ids"),
    (GENERATE, {"token_ids": [300]}, "token_ids"),
    (GENERATE, {"token_ids": [1], "sampling_params": []}, "sampling_params"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"max_tokens": -5}}, "sampling_params.max_tokens"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"n": 2}}, "sampling_params.n"),
    (GENERATE, {"token_ids": [1], "sampling_params": {"top_q": 2}}, "sampling_params.top_q"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
    ("/detokenize", {"tokens": [1000]}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
]


@pytest.mark.parametrize("path, body, param", BAD_BODIES, ids=lambda value: str(value)[:60])
def test_bad_bodies_are_400_and_name_the_parameter(device: Device, path: str, body: Any, param: str | None) -> None:
    answer = device.post(path, body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"


BAD_BYTES = [
    b"",
    b"{",
    b'{"prompt": "x"} trailing',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff"}',
    b"\xff\xfe\x00",
    b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"prompt": "x", "echo": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"prompt": "x", "max_tokens": ' + b"9" * 100_000 + b"}",
    b'{"prompt": "x", "logit_bias": ' + b"9" * 100_000 + b"}",
]


@pytest.mark.parametrize("raw", BAD_BYTES, ids=lambda raw: str(raw[:40]))
def test_bytes_that_are_not_json(device: Device, raw: bytes) -> None:
    answer = device.ask("POST", COMPLETIONS, raw=raw)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"


def test_context_errors_have_both_numbers(device: Device) -> None:
    message = device.complete(prompt="x" * 9000).error["message"]
    assert "9000" in message
    assert "8192" in message
    message = device.complete(prompt="x" * 100, max_tokens=8100).error["message"]
    assert all(number in message for number in ("100", "8100", "8192"))


def test_a_misspelt_parameter_gets_the_nearest_name(device: Device) -> None:
    assert "did you mean `max_tokens`" in device.complete(prompt="x", max_tokns=5).error["message"]


@pytest.mark.parametrize(
    "neutral",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "echo": False, "suffix": None},
        {"use_beam_search": False, "skip_special_tokens": True, "user": "somebody", "best_of": 1, "n": 1},
        {"stop": None, "seed": None, "temperature": None, "top_p": None, "max_tokens": None, "stream": None},
    ],
)
def test_neutral_values_are_taken(device: Device, neutral: dict[str, Any]) -> None:
    assert device.complete(prompt="x", **neutral).status == 200


def test_neutral_values_of_chat_are_taken(device: Device) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "service_tier": "auto",
        "store": False,
        "metadata": None,
        "reasoning_effort": None,
        "max_tokens": 1,
    }
    assert device.post(CHAT, {"messages": USER} | neutral).status == 200


def test_unknown_models_routes_and_methods(device: Device) -> None:
    unknown = device.complete(model="gpt-17", prompt="x")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert device.ask("GET", "/v1/nothing").status == 404
    assert device.ask("GET", "/v1/nothing").error["code"] == "not_found"
    wrong = device.ask("GET", COMPLETIONS)
    assert (wrong.status, wrong.headers["Allow"], wrong.error["code"]) == (405, "POST", "method_not_allowed")


def test_a_body_that_is_too_large(device: Device) -> None:
    answer = device.ask("POST", COMPLETIONS, raw=b" " * (5 << 20))
    assert answer.status == 413
    assert answer.error["code"] == "request_entity_too_large"
    bomb = device.ask("POST", COMPLETIONS, raw=gzip.compress(b" " * (64 << 20)), headers={"Content-Encoding": "gzip"})
    assert bomb.status == 413
    assert bomb.error["message"]


def test_a_body_that_is_not_what_its_encoding_says(device: Device) -> None:
    answer = device.ask("POST", COMPLETIONS, raw=b"not gzip at all", headers={"Content-Encoding": "gzip"})
    assert answer.status == 400
    packed = gzip.compress(b'{"prompt": "x", "max_tokens": 1}')
    assert device.ask("POST", COMPLETIONS, raw=packed, headers={"Content-Encoding": "gzip"}).status == 200


@pytest.mark.parametrize(
    "raw", [b"\0" * 100, b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n"]
)
def test_bytes_that_are_not_http(device: Device, raw: bytes) -> None:
    with socket.create_connection((HOST, device.port), timeout=30) as connection:
        connection.sendall(raw)
        assert connection.recv(4096).startswith(b"HTTP/1.0 400")
    assert device.ask("GET", "/health").status == 200
