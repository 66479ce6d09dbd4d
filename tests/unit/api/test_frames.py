"""Frames are read however the stream is cut, and a length that no peer sends is refused before memory is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.api.frames import FRAME_BYTES_MAX, LENGTH_BYTES, FrameReader
from rose.errors import Unavailable


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 50), max_size=20))
def test_bodies_do_not_depend_on_how_the_stream_is_cut(bodies: list[bytes], cuts: list[int]) -> None:
    data, reader, received = b"".join(map(framed, bodies)), FrameReader(), list[bytes]()
    for cut in [*cuts, len(data)]:
        received += reader.push(data[:cut])
        data = data[cut:]
    assert received == bodies


def test_a_frame_above_the_limit_is_refused_by_its_length() -> None:
    reader = FrameReader()
    assert list(reader.push(FRAME_BYTES_MAX.to_bytes(LENGTH_BYTES, "little"))) == []
    with pytest.raises(Unavailable, match="frame of"):
        list(FrameReader().push((FRAME_BYTES_MAX + 1).to_bytes(LENGTH_BYTES, "little")))
