"""Bodies: typed, bounded, strict; known parameters at their neutral value, unknown ones by their nearest name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rose.front import chat, completions, generate, information
from rose.front.bodies import ONCE_BYTES_MAX, BodyReader
from rose.front.failures import Failure
from rose.front.prompts import prompts_of
from rose.front.routes import ROUTES, openapi_document

READERS: dict[str, BodyReader[Any]] = {
    "completions": completions.READER,
    "chat": chat.READER,
    "generate": generate.READER,
    "sampling": generate.SAMPLING_READER,
    "tokenize": information.TOKENIZE_READER,
}
LEAST: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x"},
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "generate": {"token_ids": [1]},
    "sampling": {},
    "tokenize": {},
}
NEUTRAL = [
    (name, param, value)
    for name, reader in READERS.items()
    for param, accepted in reader.neutral.items()
    for value in (None, *accepted)
]


def refused(name: str, **body: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        READERS[name].read(msgspec.json.encode(LEAST[name] | body))
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name, param, value", NEUTRAL)
def test_neutral_values_are_taken(name: str, param: str, value: Any) -> None:
    body = READERS[name].read(msgspec.json.encode(LEAST[name] | {param: value}))
    assert body == READERS[name].read(msgspec.json.encode(LEAST[name]))


def test_large_bodies_are_read_as_small_ones_are() -> None:
    prompt = "x" * (ONCE_BYTES_MAX + 1)
    body = completions.READER.read(msgspec.json.encode({"prompt": prompt, "n": 1, "frequency_penalty": 0}))
    assert body.prompt == prompt and body.n == 1
    assert refused("completions", prompt=prompt, promt=1).body.error.code == "unknown_parameter"
    assert refused("completions", prompt=prompt, n=-1).body.error.param == "n"


@pytest.mark.parametrize("name, param", sorted({(name, param) for name, param, _ in NEUTRAL}))
def test_any_other_value_is_refused_by_name(name: str, param: str) -> None:
    detail = refused(name, **{param: {"some": "thing else"}}).body.error
    prefix = "sampling_params." if name == "sampling" else ""
    assert detail.param == prefix + param
    assert detail.code == "unsupported_parameter"


@pytest.mark.parametrize("value, is_neutral", [(False, True), (0, False), (None, True), (True, False), ("", False)])
def test_zero_is_not_false(value: Any, is_neutral: bool) -> None:
    if is_neutral:
        assert READERS["completions"].read(msgspec.json.encode({"prompt": "x", "echo": value}))
    else:
        assert refused("completions", echo=value).body.error.param == "echo"


@pytest.mark.parametrize(
    "name, typed, meant",
    [
        ("completions", "max_token", "max_tokens"),
        ("completions", "temprature", "temperature"),
        ("completions", "presence_penality", "presence_penalty"),
        ("chat", "max_completion_token", "max_completion_tokens"),
        ("sampling", "min_token", "sampling_params.min_tokens"),
    ],
)
def test_a_misspelt_parameter_gets_the_nearest_name(name: str, typed: str, meant: str) -> None:
    detail = refused(name, **{typed: 1}).body.error
    assert detail.code == "unknown_parameter"
    assert f"did you mean `{meant}`" in detail.message


def test_a_parameter_like_no_other_gets_no_suggestion_and_a_short_echo() -> None:
    detail = refused("completions", **{"zzzz" * 1000: 1}).body.error
    assert "did you mean" not in detail.message
    assert len(detail.message) < 200


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


def test_no_parameter_is_both_implemented_and_neutral() -> None:
    for reader in READERS.values():
        assert not set(reader.neutral) & set(reader.kind.__struct_fields__)


def test_the_document_names_every_route_and_every_parameter() -> None:
    document = openapi_document("some-model")
    assert set(document["paths"]) == {route.operation.path for route in ROUTES}
    schemas = document["components"]["schemas"]
    for reader in READERS.values():
        properties = schemas[reader.kind.__name__]["properties"]
        assert set(properties) == {*reader.kind.__struct_fields__, *reader.neutral}
        assert schemas[reader.kind.__name__]["additionalProperties"] is False
    assert schemas["CompletionBody"]["required"] == ["prompt"]
    assert schemas["CompletionBody"]["properties"]["model"]["enum"] == [None, "some-model"]
