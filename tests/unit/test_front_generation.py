"""What becomes of the engine's events: text, tokens, reasons and version spans of one choice."""

from __future__ import annotations

import json

import msgspec

from rose.engines.base import Request, Sampling, TokenEvent
from rose.front.events import event
from rose.front.generation import Choice, WeightSpan
from rose.front.logprobs import LOGPROB_MIN, generate_logprobs
from rose.front.replies import AssistantMessage
from rose.front.text import ChoiceText
from rose.models.stream import ByteStream


def choice(*stops: str, sampling: Sampling | None = None) -> Choice:
    text = ChoiceText(ByteStream(lambda token_id: bytes([token_id])), stops)
    return Choice(0, Request("r", (1,), sampling or Sampling()), text)


def token_event(text: str, finish: str | None = None, version: str = "v0", cached: int | None = None) -> TokenEvent:
    ids = tuple(text.encode())
    return TokenEvent("r", ids, (-0.5,) * len(ids), version, finish, (), cached)  # type: ignore[arg-type]


def test_text_tokens_and_reason_add_up() -> None:
    found = choice()
    pieces = [found.push(token_event("a", cached=3)), found.push(token_event("b", "length"))]
    assert [piece.text for piece in pieces] == ["a", "b"]
    assert [piece.start for piece in pieces] == [0, 1]
    assert (found.text, found.token_ids, found.finish_reason) == ("ab", [97, 98], "length")
    assert found.cached_tokens == 3


def test_the_token_that_stopped_the_engine_is_counted_and_not_shown() -> None:
    found = choice(sampling=Sampling(stop_token_ids=(98,)))
    found.push(token_event("a"))
    found.push(token_event("b", "stop"))
    assert (found.text, found.token_ids, found.finish_reason, found.stop_reason) == ("a", [97, 98], "stop", 98)


def test_the_models_own_end_has_no_stop_reason() -> None:
    found = choice()
    found.push(token_event("b", "stop"))
    assert (found.text, found.stop_reason) == ("", None)


def test_a_stop_string_ends_a_choice_in_the_middle_of_an_event() -> None:
    found = choice("END")
    piece = found.push(token_event("one END two"))
    assert (piece.text, piece.finish_reason, found.stop_reason) == ("one ", "stop", "END")
    assert len(found.token_ids) == len("one END")


def test_an_evicted_choice_keeps_what_it_has() -> None:
    found = choice("END")
    found.push(token_event("one E"))
    piece = found.push(token_event("", "abort"))
    assert (piece.text, found.text, found.finish_reason) == ("E", "one E", "abort")


def test_spans_follow_the_versions() -> None:
    found = choice()
    for text, version in (("a", "v0"), ("bc", "v0"), ("d", "v1"), ("", "v2")):
        found.push(token_event(text, version=version))
    assert found.spans == [WeightSpan("v0", 0, 3), WeightSpan("v1", 3, 4)]


def test_a_probability_of_zero_is_still_json() -> None:
    found = choice()
    piece = found.push(TokenEvent("r", (5,), (float("-inf"),), "v0"))
    [entry] = generate_logprobs([piece], 0).content
    assert entry.logprob == LOGPROB_MIN
    assert json.loads(msgspec.json.encode(entry))["token"] == "token_id:5"


def test_an_event_is_one_line_whatever_the_text() -> None:
    sent = event(AssistantMessage(content="a\nb\r\n\n\u2028data: x"))
    assert sent.startswith(b"data: {")
    assert sent.endswith(b"}\n\n")
    assert sent.count(b"\n") == 2
    assert json.loads(sent.removeprefix(b"data: "))["content"] == "a\nb\r\n\n\u2028data: x"
