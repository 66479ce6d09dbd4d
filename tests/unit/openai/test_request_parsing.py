"""Bodies: bounded, decompressed, typed and strict; unknown parameters get the nearest name."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.unit.front_world import FrontWorld, run_with_server
from tests.unit.openai.readers import READERS, refused

from rose.models.model_folder import ModelFolder
from rose.openai import (
    chat,
    completions,
    request_parsing,
)
from rose.openai.http_errors import Failure
from rose.openai.request_parsing import (
    COMMAS_MAX,
    CONTAINERS_MAX,
    ESCAPES_MAX,
    ONCE_BYTES_MAX,
    TEXTS_MAX,
    check_free,
    is_surely_small,
    too_large,
)

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"

LISTS = b"[" + b",".join([b"[]"] * CONTAINERS_MAX) + b"]"


@pytest.mark.parametrize(
    "encoding, packed",
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data, wbits=-15)),
        ("identity", lambda data: data),
    ],
)
def test_a_compressed_body_is_read(folder: ModelFolder, encoding: str, packed: Callable[[bytes], bytes]) -> None:
    async def story(found: FrontWorld) -> None:
        headers: dict[str, str | bytes] = {"Content-Encoding": encoding}
        assert (await found.ask("POST", COMPLETIONS, packed(b'{"prompt":[1]}'), headers))[0] == 200

    run_with_server(folder, story)


@pytest.mark.parametrize(
    "encoding, body, status",
    [
        ("br", b"x", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(b'{"prompt":[1]}')[:-9], 400),
        ("gzip", gzip.compress(bytes(8 << 20)), 413),
        ("deflate", b"\xff\xff", 400),
    ],
)
def test_a_body_that_cannot_be_decompressed_is_refused(
    folder: ModelFolder, encoding: str, body: bytes, status: int
) -> None:
    async def story(found: FrontWorld) -> None:
        assert (await found.ask("POST", COMPLETIONS, body, {"Content-Encoding": encoding}))[0] == status

    run_with_server(folder, story)


def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        for body in (b'{"prompt":%s}' % LISTS, b'{"prompt":"x","a":%s}' % LISTS):
            status, answer = await found.post(COMPLETIONS, body)
            assert (status, answer["error"]["code"]) == (400, "body_too_complex")
        quoted = b'{"prompt":"%s","max_tokens":1}' % LISTS  # the same, but a text
        assert (await found.post(COMPLETIONS, quoted))[1]["error"]["code"] == "context_length_exceeded"

    run_with_server(folder, story)


def test_a_suggestion_looks_at_the_beginning_of_a_name_only(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def note(name: str, *_: Any, **__: Any) -> list[str]:
        seen.append(name)
        return []

    monkeypatch.setattr(request_parsing.difflib, "get_close_matches", note)

    async def story(found: FrontWorld) -> None:
        assert (await found.post(COMPLETIONS, {"prompt": "x", "n" * 10_000: 1}))[0] == 400
        assert [len(name) for name in seen] == [request_parsing.NAME_SHOWN]

    run_with_server(folder, story)


def test_an_error_does_not_repeat_the_whole_body(folder: ModelFolder) -> None:
    async def story(found: FrontWorld) -> None:
        status, answer = await found.post("/v1/chat/completions", {"messages": [{"role": "x" * 100_000}]})
        assert status == 400 and len(str(answer)) < 1000

    run_with_server(folder, story)


def test_large_bodies_are_read_as_small_ones_are() -> None:
    prompt = "x" * (ONCE_BYTES_MAX + 1)
    body = completions.READER.read(msgspec.json.encode({"prompt": prompt, "n": 1, "frequency_penalty": 0}))
    assert body.prompt == prompt and body.n == 1
    assert refused("completions", prompt=prompt, promt=1).body.error.code == "unknown_parameter"
    assert refused("completions", prompt=prompt, n=-1).body.error.param == "n"


@pytest.mark.parametrize("value, is_accepted", [(False, True), (0, False), (None, True), (True, False), ("", False)])
def test_zero_is_not_false(value: Any, is_accepted: bool) -> None:
    if is_accepted:
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
    "value, containers, commas",
    [
        ({"a": [1, 2, {"b": []}]}, 4, 2),
        ({"text": '[[[{{{,,,"[', "b": "\\"}, 1, 1),
        ({"a": '\\"[', "b": ["\\\\", '"', "\\", ""]}, 2, 4),
        ("[,{", 0, 0),
    ],
)
def test_only_structure_is_counted(value: Any, containers: int, commas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(value).encode()
    for most_containers, most_commas, is_fine in (
        (containers, commas, True),
        (containers - 1, commas, False),
        (containers, commas - 1, False),
    ):
        monkeypatch.setattr(request_parsing, "CONTAINERS_MAX", most_containers)
        monkeypatch.setattr(request_parsing, "COMMAS_MAX", most_commas)
        assert (too_large(data) is None) == is_fine or min(most_containers, most_commas) < 0


def test_what_looks_small_is_small() -> None:
    for data in (b"[" * CONTAINERS_MAX, b'{"a":"' + b"," * COMMAS_MAX + b'"}', b" " * (4 << 20)):
        assert is_surely_small(data)
        assert too_large(data) is None
    escapes = b'"' + b"\\n" * (ESCAPES_MAX + 1) + b'"'
    for data in (b"[]," * (CONTAINERS_MAX + 1), b"1," * (COMMAS_MAX + 1), b'"",' * (TEXTS_MAX + 1), escapes):
        assert not is_surely_small(data)
        assert too_large(data)


@pytest.mark.parametrize("data", [b'"', b'"\\', b'"\\"', b"", b'\\"["', b'"' * 99_999])
def test_text_that_is_no_json_is_counted_to_its_end(data: bytes) -> None:
    assert too_large(data) is None


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "value, is_fine",
    [
        (nested(60), True),
        (nested(65), False),
        ({"a": [0] * 8000}, True),
        ({"a": [0] * 9000}, False),
        ({"a": 2**64 - 1, "b": -(2**128), "c": 1e300}, True),
        ({"a": [{"maximum": 2**1024}]}, False),
        ({}, True),
    ],
)
def test_free_json_is_bounded(value: Any, is_fine: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": value}}
    for found in (body | {"tools": [tool]}, body | {"chat_template_kwargs": value}):
        if is_fine:
            assert chat.READER.read(msgspec.json.encode(found))
            continue
        with pytest.raises(Failure) as refused:
            chat.READER.read(json.dumps(found).encode())
        assert refused.value.status == 400


def test_a_free_value_names_its_field() -> None:
    with pytest.raises(ValueError, match="`some_field` is nested"):
        check_free(nested(1000), "some_field")
