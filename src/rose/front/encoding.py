"""Encodes an answer into JSON, a large one in parts that are never copied into one.

A whole answer with log-probabilities may have tens of megabytes. To encode or copy it in one call would hold Python's
lock, and with it the event loop, for a tenth of a second. So long lists arrive here encoded in batches (`EncodedList`).
The encoder writes a mark in their place, and the answer is the text between the marks with the batches in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

# Part of no answer, since it cannot be guessed.
_MARK = b'"%s"' % secrets.token_hex(16).encode()


class EncodedList:
    """A JSON list in batches: the items of each, encoded, without brackets. Not a type that msgspec knows."""

    def __init__(self, batches: Sequence[bytes]) -> None:
        self.batches = batches


def _joined(value: object) -> msgspec.Raw:
    assert isinstance(value, EncodedList), f"{type(value).__name__} is not part of an answer"
    return msgspec.Raw(b"[" + b",".join(value.batches) + b"]")


ENCODER = msgspec.json.Encoder(enc_hook=_joined)  # of answers that are not large, and of the chunks of a stream


def encode_parts(answer: msgspec.Struct) -> list[bytes]:
    """Return the JSON of a large answer as parts to be sent one after the other."""
    lists: list[EncodedList] = []

    def leave_out(value: object) -> msgspec.Raw:
        assert isinstance(value, EncodedList), f"{type(value).__name__} is not part of an answer"
        lists.append(value)
        return msgspec.Raw(_MARK)

    first, *rest = msgspec.json.encode(answer, enc_hook=leave_out).split(_MARK)
    parts = [first]
    for found, after in zip(lists, rest, strict=True):
        for number, batch in enumerate(found.batches):
            parts += (b"," if number else b"[", batch)
        parts += (b"]", after)
    return parts
