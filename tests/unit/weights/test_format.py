"""Header and directory: bytes of version 1, and everything that is refused before a block is decoded."""

from __future__ import annotations

import numpy as np
import pytest

from rose.weights import codec
from rose.weights.codec import CodecError, Kind
from rose.weights.codec.format import HEADER

GOLDEN = "524f5357010001006400000000000000000010000d0000100400000002d84580afc9afa003"


def test_nothing_at_all_is_a_payload_too():
    empty = np.empty(0, np.uint16)
    payload = codec.encode(empty, empty)
    codec.apply(payload, empty)
    told = codec.describe(payload)
    assert (told.elements, told.kind, told.blocks_by_mode, len(payload)) == (0, Kind.DELTA, {}, HEADER.size)


@pytest.mark.parametrize("place, value, words", [
    (4, 2, "version 2"),
    (5, 7, "kind 7"),
    (6, 9, "type 9"),
    (7, 1, "version"),
    (8, 11, "destination|blocks end|too short"),
    (15, 0x80, "too short"),
    (18, 0, "blocks of 0"),
    (23, 0x90, "unknown mode"),
])  # fmt: skip
def test_a_changed_header_is_refused(place, value, words):
    base = np.arange(300, dtype=np.uint16)
    payload = bytearray(codec.encode(base, base + np.uint16(1)))
    payload[place] = value
    with pytest.raises(CodecError, match=words):
        codec.apply(payload, base)


def test_a_full_payload_may_not_need_a_base():
    base = np.arange(300, dtype=np.uint16)
    payload = bytearray(codec.encode(base, base + np.uint16(1)))
    payload[5] = Kind.FULL
    with pytest.raises(CodecError, match="needs a base"):
        codec.describe(payload)


def test_the_bytes_are_those_of_version_1():
    """What is on relays and disks stays readable: these bytes were written by the first version."""
    base = np.arange(0, 6400, 64, dtype=np.uint16)
    new = base.copy()
    new[[3, 40, 41, 99]] += np.array([1, 2, 65535, 1000], np.uint16)
    payload = codec.encode(base, new)
    assert payload.hex() == GOLDEN
    codec.apply(payload, base)
    assert np.array_equal(base, new)


def test_a_directory_that_promises_too_much_allocates_nothing():
    header = codec.encode(np.zeros(10, np.uint16), np.zeros(10, np.uint16))[:8]
    payload = header + (2**63).to_bytes(8, "little") + (1).to_bytes(4, "little") + bytes(100)
    with pytest.raises(CodecError, match="too short"):
        codec.describe(payload)
