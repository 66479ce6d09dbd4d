"""Responses as bytes: in parts, and as events."""

from __future__ import annotations

import json

import msgspec
import pytest

from rose.openai.response_rendering import BATCH, in_batches
from rose.openai.response_schemas import AssistantMessage, GenerateLogprob, GenerateLogprobs
from rose.openai.response_writing import ENCODER, EncodedList, encode_parts, event


def test_an_event_is_one_line_whatever_the_text() -> None:
    sent = event(AssistantMessage(content="a\nb\r\n\n\u2028data: x"))
    assert sent.startswith(b"data: {")
    assert sent.endswith(b"}\n\n")
    assert sent.count(b"\n") == 2
    assert json.loads(sent.removeprefix(b"data: "))["content"] == "a\nb\r\n\n\u2028data: x"


def entry(number: int) -> GenerateLogprob:
    return GenerateLogprob(f"token_id:{number}", number, -float(number))


@pytest.mark.parametrize("count", [0, 1, BATCH, BATCH + 1, 3 * BATCH + 5])
def test_an_answer_in_parts_is_the_same_answer(count: int) -> None:
    plain = GenerateLogprobs([entry(number) for number in range(count)])
    batched = GenerateLogprobs(in_batches(entry(number) for number in range(count)))
    assert isinstance(batched.content, EncodedList) == (count > BATCH)
    assert b"".join(encode_parts(batched)) == ENCODER.encode(batched) == msgspec.json.encode(plain)
