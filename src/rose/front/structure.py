"""Bounds on JSON that no type describes: how many values a body has, and how deep and large a free-form value is.

Decoding holds Python's lock, so a thread does not keep the event loop free: the work must be bounded before it begins.
A list or object costs a hundred times more than a byte of text, and the 4 MB of a body hold two million of them. So
`is_surely_small` counts brackets, commas and quotes first, which is fast. Only if there are too many does `too_large`
look which of them are inside a text. That may take long, so it runs in a thread.

Free-form JSON (tool schemas, template variables, arguments of calls) is decoded as `Any` and then checked by
`check_free`: depth, number of values, and integers of bounded size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from rose.bounds import NAME_CHARACTERS_MAX

CONTAINERS_MAX = 1 << 16  # lists and objects of one body: about 15 ms of decoding
TEXTS_MAX = 1 << 17  # texts and keys of one body: about 10 ms of decoding
COMMAS_MAX = 1 << 20  # items of one body: about 20 ms of decoding; a context of a million tokens
FREE_INTEGER_BITS_MAX = 1024  # schemas state limits of unsigned 64-bit and 128-bit numbers
FREE_DEPTH_MAX = 64  # schemas of real tools have fewer than 20 levels; the interpreter's own limit is 1,000
FREE_VALUES_MAX = 1 << 13  # of one tool or one set of variables
CHECKED_BY = "checked_by"  # key of `Meta.extra`: which check bounds a value that its type does not bound

FreeValue = Annotated[Any, Meta(extra={CHECKED_BY: "rose.front.structure.check_free"})]
FreeObject = Annotated[
    dict[Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)], FreeValue], Meta(max_length=FREE_VALUES_MAX)
]


class FreeJson(msgspec.Struct):
    """A decoded struct with free-form fields, which are checked as soon as it is decoded."""

    FREE: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name in self.FREE:
            value = getattr(self, name)
            if value is not None:
                check_free(value, name)


def check_free(value: Any, name: str) -> None:
    """Raise ValueError if a free-form value is too deep or too large; msgspec adds where it is."""
    level, values = [value], 0
    for _ in range(FREE_DEPTH_MAX):
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, int) and item.bit_length() > FREE_INTEGER_BITS_MAX:
                raise ValueError(f"`{name}` has an integer of more than {FREE_INTEGER_BITS_MAX} bits")
        values += len(below)
        if values > FREE_VALUES_MAX:
            raise ValueError(f"`{name}` has more than {FREE_VALUES_MAX} values")
        if not below:
            return
        level = below
    raise ValueError(f"`{name}` is nested more than {FREE_DEPTH_MAX} levels deep")


def is_surely_small(data: bytes) -> bool:
    """Return whether a JSON text has few values even if all its brackets, commas and quotes were structure."""
    if len(data) <= CONTAINERS_MAX:
        return True
    return (
        data.count(b"[") + data.count(b"{") <= CONTAINERS_MAX
        and data.count(b",") <= COMMAS_MAX
        and data.count(b'"') <= 2 * TEXTS_MAX
    )


def too_large(data: bytes) -> str | None:
    """Return what a JSON text has too many of; None if it is within bounds. May take long: call it in a thread."""
    containers = commas = texts = position = 0
    while True:
        quote = data.find(b'"', position)
        end = quote if quote >= 0 else len(data)
        containers += data.count(b"[", position, end) + data.count(b"{", position, end)
        commas += data.count(b",", position, end)
        if containers > CONTAINERS_MAX:
            return f"more than {CONTAINERS_MAX} lists and objects"
        if commas > COMMAS_MAX:
            return f"more than {COMMAS_MAX} items"
        if quote < 0:
            return None
        texts += 1
        if texts > TEXTS_MAX:
            return f"more than {TEXTS_MAX} texts and keys"
        position = _end_of_text(data, quote + 1)


def _end_of_text(data: bytes, start: int) -> int:
    """Return the position after the closing quote of the text that begins at `start`."""
    searched = start
    while (quote := data.find(b'"', searched)) >= 0:
        before = data[searched:quote]
        backslashes = len(before) - len(before.rstrip(b"\\"))
        if backslashes % 2 == 0:
            return quote + 1
        searched = quote + 1  # it was escaped
    return len(data)
