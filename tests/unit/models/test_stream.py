"""Streams of text: nothing is taken back, and the pieces of any split are the whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.models.made_tokenizers import KINDS, tokenizer_of

from rose.models.stream import ByteStream, WindowStream, token_bytes


@st.composite
def split_ids(draw: st.DrawFn, kind: str) -> list[list[int]]:
    """Token ids of some text or none at all, in batches of any size."""
    tokenizer = tokenizer_of(kind)
    of_text = st.text(max_size=20).map(tokenizer.encode)
    anything = st.lists(st.integers(0, tokenizer.size + 1), max_size=20)
    ids = [token_id for part in draw(st.lists(of_text | anything, max_size=5)) for token_id in part]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)])]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_any_split_are_the_whole(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    batches = data.draw(split_ids(kind))
    stream = tokenizer.stream(skip_special_tokens=skip)
    pieces = [stream.push(batch) for batch in batches]
    whole = tokenizer.decode([token_id for batch in batches for token_id in batch], skip_special_tokens=skip)
    assert "".join([*pieces, stream.finish()]) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_as_soon_as_it_is_certain(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    stream = tokenizer.stream()
    ids = tokenizer.encode("a b a b")
    assert "".join(stream.push([token_id]) for token_id in ids) == "a b a b"


def test_a_character_waits_for_its_bytes() -> None:
    stream = tokenizer_of("bytes").stream()
    assert [stream.push([byte]) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert stream.push([0xE6]) == ""
    assert stream.finish() == "�"


def test_bytes_that_are_no_character_do_not_wait() -> None:
    stream = tokenizer_of("bytes").stream()
    assert [stream.push([0x80]) for _ in range(3)] == ["�", "�", "�"]


@pytest.mark.parametrize("kind", ["lake", "llama", "metaspace"])
def test_a_window_stays_small(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    inner = KINDS[kind]()
    decoded_tokens = []

    def decode(ids: Any) -> str:
        decoded_tokens.append(len(ids))
        return inner.decode(ids, skip_special_tokens=False)

    stream = WindowStream(decode, tokenizer.token)
    ids = tokenizer.encode("the lake é 湖 a ") * 200
    for token_id in ids:
        stream.push([token_id])
    assert sum(decoded_tokens) < 10 * len(ids)


def test_which_stream_is_used() -> None:
    assert isinstance(tokenizer_of("bytes").stream(), ByteStream)
    assert isinstance(tokenizer_of("llama").stream(), WindowStream)


def test_token_bytes() -> None:
    assert token_bytes("Ġa") == b" a"
    assert token_bytes("<a b>") == b"<a b>"
    assert tokenizer_of("bytes").token_bytes(0xE6) == b"\xe6"
    assert tokenizer_of("lake").token_bytes(tokenizer_of("lake").encode("Left")[0]) == b"Left"
    assert tokenizer_of("bytes").token_bytes(10_000) == b""
