"""Bounds on JSON that no type describes, and answers that are encoded in parts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from rose.front import chat, structure
from rose.front.encoding import ENCODER, EncodedList, encode_parts
from rose.front.failures import Failure
from rose.front.logprobs import BATCH, in_batches
from rose.front.replies import GenerateLogprob, GenerateLogprobs
from rose.front.structure import COMMAS_MAX, CONTAINERS_MAX, TEXTS_MAX, check_free, is_surely_small, too_large


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
        monkeypatch.setattr(structure, "CONTAINERS_MAX", most_containers)
        monkeypatch.setattr(structure, "COMMAS_MAX", most_commas)
        assert (too_large(data) is None) == is_fine or min(most_containers, most_commas) < 0


def test_what_looks_small_is_small() -> None:
    for data in (b"[" * CONTAINERS_MAX, b'{"a":"' + b"," * COMMAS_MAX + b'"}', b" " * (4 << 20)):
        assert is_surely_small(data)
        assert too_large(data) is None
    for data in (b"[]," * (CONTAINERS_MAX + 1), b"1," * (COMMAS_MAX + 1), b'"",' * (TEXTS_MAX + 1)):
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


def entry(number: int) -> GenerateLogprob:
    return GenerateLogprob(f"token_id:{number}", number, -float(number))


@pytest.mark.parametrize("count", [0, 1, BATCH, BATCH + 1, 3 * BATCH + 5])
def test_an_answer_in_parts_is_the_same_answer(count: int) -> None:
    plain = GenerateLogprobs([entry(number) for number in range(count)])
    batched = GenerateLogprobs(in_batches(entry(number) for number in range(count)))
    assert isinstance(batched.content, EncodedList) == (count > BATCH)
    assert b"".join(encode_parts(batched)) == ENCODER.encode(batched) == msgspec.json.encode(plain)
