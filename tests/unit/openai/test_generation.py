"""Events of an engine become text, tokens, reasons and version spans of a choice; stop strings cut the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.api.requests import VersionSpan
from rose.engines.base import Request, Sampling, TokenEvent
from rose.models.stream import ByteStream
from rose.openai.generation import Choice, ChoiceText, StopFinder


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
    assert found.spans == [VersionSpan("v0", 0, 3), VersionSpan("v1", 3, 4)]


LETTERS = st.text("ab", max_size=30)

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def shown(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What comes out per piece, up to the piece that ends it."""
    finder, out = StopFinder(stops), []
    for piece in pieces:
        out.append(finder.push(piece))
        if finder.match is not None:
            return out, finder.match
    return [*out, finder.finish()], None


@pytest.mark.parametrize(
    "story, stops, pieces, expected, found",
    [
        ("no stop strings: all at once", [], ["ab", "c"], ["ab", "c", ""], None),
        ("in one piece", ["END"], ["one END two"], ["one "], "END"),
        ("across pieces", ["END"], ["one E", "N", "D two"], ["one ", "", ""], "END"),
        ("a false start is shown later", ["END"], ["one E", "Nx"], ["one ", "ENx", ""], None),
        ("a false start at the end is shown", ["END"], ["one EN"], ["one ", "EN"], None),
        ("a false start that starts again", ["aab"], ["aa", "ab"], ["", "a"], "aab"),
        ("the one complete first wins", ["abcd", "b"], ["abcd"], ["a"], "b"),
        ("the longer one of two that end together", ["b", "ab"], ["xab"], ["x"], "ab"),
        ("as the first thing", ["\n"], ["\nmore"], [""], "\n"),
    ],
)
def test_stop_strings_cut_the_text(
    story: str, stops: list[str], pieces: list[str], expected: list[str], found: str | None
) -> None:
    assert shown(stops, pieces) == (expected, found), story


@given(LETTERS, STOPS, st.lists(st.integers(0, 30)))
def test_the_result_does_not_depend_on_pieces(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[low:high] for low, high in pairwise(edges)]
    by_pieces, found_by_pieces = shown(stops, pieces)
    by_characters, found_by_characters = shown(stops, list(text))
    assert "".join(by_pieces) == "".join(by_characters)
    assert found_by_pieces == found_by_characters


@given(LETTERS, STOPS)
def test_no_stop_string_is_ever_shown(text: str, stops: list[str]) -> None:
    out, found = shown(stops, list(text))
    assert not any(stop in "".join(out) for stop in stops)
    assert (found is not None) == any(stop in text for stop in stops)
    assert text.startswith("".join(out))
    if found is None:
        assert "".join(out) == text


@given(LETTERS, STOPS)
def test_nothing_is_held_that_cannot_become_a_stop_string(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    seen = finder.push(text)
    if finder.match is None:
        held = text[len(seen) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def bytes_text(stops: tuple[str, ...] = (), min_tokens: int = 0) -> ChoiceText:
    return ChoiceText(ByteStream(lambda token_id: bytes([token_id])), stops, min_tokens)


def test_a_character_is_shown_when_its_last_byte_came() -> None:
    text = bytes_text()
    assert [text.push(byte) for byte in "é!".encode()] == ["", "é", "!"]
    assert text.finish() == ""


def test_a_character_that_stays_broken_is_shown_as_such() -> None:
    text = bytes_text()
    assert text.push("é".encode()[0]) == ""
    assert text.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_broken_end_can_complete_a_stop_string() -> None:
    text = bytes_text(("\N{REPLACEMENT CHARACTER}",))
    assert text.push("é".encode()[0]) == ""
    assert text.finish() == ""
    assert text.stopped_by == "\N{REPLACEMENT CHARACTER}"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    text = bytes_text(("a",), min_tokens=2)
    assert [text.push(byte) for byte in b"aaba"] == ["a", "a", "b", ""]
    assert text.stopped_by == "a"
    assert text.push(ord("z")) == text.finish() == ""
