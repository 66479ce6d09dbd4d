"""Log-probabilities, token counts and streams as routes render them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rose.api.requests import Request, Sampling, TokenEvent
from rose.openai.generation import Choice
from rose.openai.http_errors import Failure
from rose.openai.request_schemas import CompletionBody, StreamOptions
from rose.openai.response_rendering import (
    BATCH,
    LOGPROB_MIN,
    chat_logprobs,
    check_stream,
    completion_logprobs,
    generate_logprobs,
    new_id,
    usage_of,
)
from rose.openai.response_writing import EncodedList

TOKENIZER: Any = SimpleNamespace(token_bytes=lambda token_id: bytes([token_id]))


def choice_of(*token_ids: int, prompt: tuple[int, ...] = (1,), top: int = 0, cached: int | None = None) -> Choice:
    """Return a choice that one event has filled; alternatives are the next ids, each less likely."""
    choice = Choice(0, Request("r", prompt, Sampling(top_logprobs=top)), None)
    alternatives = tuple(tuple((token + rank, -0.5 - rank) for rank in range(top)) for token in token_ids)
    shown = alternatives if top else ()
    choice.push(TokenEvent("r", token_ids, (-0.5,) * len(token_ids), "v0", "length", shown, cached))
    return choice


def test_a_probability_of_zero_is_still_json() -> None:
    choice = Choice(0, Request("r", (1,)), None)
    piece = choice.push(TokenEvent("r", (5,), (float("-inf"),), "v0"))
    [entry] = generate_logprobs([piece], 0).content
    assert entry.logprob == LOGPROB_MIN
    assert json.loads(msgspec.json.encode(entry))["token"] == "token_id:5"


def test_completion_logprobs_have_offsets_and_the_sampled_token_among_the_best() -> None:
    logprobs = completion_logprobs(TOKENIZER, choice_of(97, 98, top=2).deltas, 2, offset=10)
    assert (logprobs.tokens, logprobs.text_offset) == (["a", "b"], [10, 11])
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}]
    assert completion_logprobs(TOKENIZER, choice_of(97).deltas, 0).top_logprobs is None


def test_chat_logprobs_list_alternatives_with_their_bytes() -> None:
    [entry] = chat_logprobs(TOKENIZER, choice_of(97, top=2).deltas, 1).content
    assert (entry.token, entry.bytes, entry.logprob) == ("a", [97], -0.5)
    assert [(best.token, best.bytes) for best in entry.top_logprobs] == [("a", [97])]
    [broken] = chat_logprobs(TOKENIZER, choice_of(0xC3).deltas, 0).content
    assert (broken.token, broken.bytes) == ("\ufffd", [0xC3])


def test_many_logprobs_are_encoded_in_batches() -> None:
    many = chat_logprobs(TOKENIZER, choice_of(*[97] * (BATCH + 1)).deltas, 0)
    assert isinstance(many.content, EncodedList)
    assert isinstance(chat_logprobs(TOKENIZER, choice_of(*[97] * BATCH).deltas, 0).content, list)


def test_a_prompt_counts_once_however_many_choices_it_has() -> None:
    choices = [choice_of(7, 8, prompt=(1, 2, 3), cached=2) for _ in range(2)]
    usage = usage_of(choices, 2)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 4, 7)
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert usage_of(choices, 1).prompt_tokens == 6


@pytest.mark.parametrize("name", ["continuous_usage_stats", "include_obfuscation"])
def test_stream_options_that_are_not_implemented_are_refused(name: str) -> None:
    options = msgspec.convert({name: True}, StreamOptions)
    with pytest.raises(Failure, match=name):
        check_stream(CompletionBody(prompt="x", stream=True, stream_options=options))
    with pytest.raises(Failure, match="needs `stream`"):
        check_stream(CompletionBody(prompt="x", stream_options=StreamOptions()))
    check_stream(CompletionBody(prompt="x", stream=True, stream_options=StreamOptions(include_usage=True)))


def test_ids_are_unique_even_when_clients_send_the_same() -> None:
    assert new_id("cmpl", "mine") != new_id("cmpl", "mine")
    assert new_id("cmpl", "mine").startswith("cmpl-mine-") and new_id("cmpl").startswith("cmpl-")
