"""Decode what others wrote, with one error for every way in which it can be wrong."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rose.bounds import UNREADABLE

Decoded = TypeVar("Decoded")


class Undecodable(Exception):
    """The bytes are not a value of the expected type."""


def decode_msgpack(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes | memoryview) -> Decoded:
    """Return the value. Raises Undecodable, whatever the bytes are."""
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise Undecodable(str(error)) from error
