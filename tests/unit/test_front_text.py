"""Stop strings: never shown, found wherever they are cut, and what is held back is shown when it is safe."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.front.text import ChoiceText, StopFinder
from rose.models.stream import ByteStream

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def shown(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What comes out per piece, up to the piece that ends it."""
    finder, out = StopFinder(stops), []
    for piece in pieces:
        out.append(finder.push(piece))
        if finder.found is not None:
            return out, finder.found
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
def test_stories(story: str, stops: list[str], pieces: list[str], expected: list[str], found: str | None) -> None:
    assert shown(stops, pieces) == (expected, found), story


@given(LETTERS, STOPS, st.lists(st.integers(0, 30)))
def test_how_the_text_is_cut_changes_nothing(text: str, stops: list[str], cuts: list[int]) -> None:
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
    if finder.found is None:
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
