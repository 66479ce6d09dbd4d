"""The compiled decoder: one body in, changes written to the destination.

It trusts nothing it reads. Bits beyond the end of a body are zeros, a position is written only if it lies in the
caller's window, tables are filled only from lengths that make a prefix code, and every loop is bounded by the number of
elements; so any bytes at all decode in bounded time without touching foreign memory. A body that could not have come
from the encoder gives False. A window is the part of a block from element `first` to before `last`.
"""

from __future__ import annotations

import numpy as np

from rose.weights.codec.contexts import fill_masks, group_count, select
from rose.weights.codec.format import (
    CLASSES,
    CONTEXT_HEAD_BYTES,
    FAR,
    KINDS,
    LARGE,
    LOW_BITS_MAX,
    ROW,
    SPARSE_HEAD_BYTES,
    Elements,
)
from rose.weights.codec.prefix_codes import (
    BAD,
    INVALID,
    TABLE_ENTRIES,
    Bytes,
    Numbers,
    Table,
    fill_table,
    peek,
    take_lengths,
)
from rose.weights.codec.words import LANES, entry, inlined, inner, leading_zeros, ones, whole

SPECIAL = INVALID  # the bit that leads out of the fast path


@inner
def _read_table(body: Bytes, at: int, own: bool, given: Bytes, table: Table) -> int:
    """Fill the table from lengths in the body or the given ones; return the bit after them, or BAD."""
    lengths = given.copy()
    if own:
        at = take_lengths(body, at, lengths)
    return at if at != BAD and fill_table(lengths, table) else BAD


@inlined
def _take_size(body: Bytes, at: int, table: Table) -> tuple[int, int]:
    """Return the size of a step and the bit after it; size 0 if no code fits."""
    word = peek(body, at)
    found = whole(table[word & (TABLE_ENTRIES - 1)])
    if found == INVALID:
        return 0, at
    length, token = found & 15, found >> 4
    if token < LARGE:
        return token + 1, at + length
    raw = ((token - LARGE) >> 1) + 1
    top = 2 | ((token - LARGE) & 1)
    return top << raw | ((word >> length) & ((1 << raw) - 1)), at + length + raw


@inner
def _mark_special(table: Table) -> None:
    for i in range(TABLE_ENTRIES):
        symbol = table[i] >> 4
        if symbol & FAR == FAR or symbol >= LARGE * ROW:
            table[i] |= SPECIAL


@inner
def _open_sparse(
    body: Bytes, elements: int, given: Bytes, given_tokens: Bytes, table: Table, large_table: Table
) -> tuple[int, int, int]:
    """Fill both tables; return the number of changes (0: not valid), the low bits of a gap and the first bit."""
    head = peek(body, 0)
    changes, flags = head & 0xFFFFFFFF, (head >> 32) & 0xFF
    low = flags & 31
    if body.shape[0] < SPARSE_HEAD_BYTES or changes > elements or flags & 32 or low > LOW_BITS_MAX:
        return 0, 0, 0
    at = _read_table(body, SPARSE_HEAD_BYTES * 8, flags & 64 != 0, given, table)
    at = at if at == BAD else _read_table(body, at, flags & 128 != 0, given_tokens, large_table)
    _mark_special(table)
    return (0, 0, 0) if at == BAD else (changes, low, at)


@inner
def _apply_changes(
    body: Bytes, at: int, changes: int, low: int, elements: int, table: Table, large_table: Table,
    destination: Elements, first: int, last: int, ranked: bool, masks: Numbers,
) -> bool:  # fmt: skip
    """Apply all changes. If `ranked`, positions count only the elements in `masks`, and the window is all of them."""
    low_mask, position = (1 << low) - 1, -1
    far = 64 - leading_zeros((elements - 1) >> low)
    group, passed, here = 0, 0, ones(masks[0])
    for _ in range(changes):
        word = peek(body, at)
        found = whole(table[word & (TABLE_ENTRIES - 1)])
        length = found & 15
        word >>= length
        gap = ((found >> 4) & FAR) << low | (word & low_mask)
        size = ((found >> 10) & LARGE) + 1
        is_negative = (word >> low) & 1
        at += length + low + 1
        if found & SPECIAL:
            if found == INVALID:
                return False
            if (found >> 4) & FAR == FAR:
                gap = (peek(body, at) & ((1 << far) - 1)) << low | (word & low_mask)
                at += far
            if size == KINDS:
                size, at = _take_size(body, at, large_table)
                if size == 0:
                    return False
        position += gap + 1
        if position >= last:
            return last < elements
        if position >= first:
            place = position - first
            if ranked:
                while position - passed >= here:  # ends: the ranks below `elements` are all in some group
                    passed += here
                    group += 1
                    here = ones(masks[group])
                place = group * LANES + select(masks[group], position - passed)
            step = size if is_negative == 0 else -size
            destination[place] = whole(destination[place]) + step
    return (at + 7) >> 3 == body.shape[0]


@entry
def apply_sparse(
    body: Bytes, destination: Elements, elements: int, first: int, last: int, given: Bytes, given_tokens: Bytes
) -> bool:
    table, large_table = np.empty(TABLE_ENTRIES, np.uint16), np.empty(TABLE_ENTRIES, np.uint16)
    changes, low, at = _open_sparse(body, elements, given, given_tokens, table, large_table)
    return changes != 0 and _apply_changes(
        body, at, changes, low, elements, table, large_table, destination, first, last, False, np.zeros(1, np.int64)
    )


@entry
def apply_context(
    body: Bytes, destination: Elements, mantissa: int, exponent: int, given: Bytes, given_tokens: Bytes
) -> bool:
    """Apply one sparse part per class. Classes are found first, since a change can move an element to another."""
    if body.shape[0] < CONTEXT_HEAD_BYTES or body[0] != CLASSES:
        return False
    bounds = np.empty(CLASSES + 1, np.int64)
    bounds[0], bounds[CLASSES] = 0, 1 << exponent
    bounds[1:CLASSES] = body[1:CLASSES]
    if bounds[1:CLASSES].max() >= 1 << exponent:
        return False
    masks = np.empty((CLASSES, group_count(destination.shape[0])), np.int64)
    fill_masks(destination, bounds, mantissa, exponent, masks)
    first = CONTEXT_HEAD_BYTES
    for number in range(CLASSES):
        size = peek(body, 8 * (CLASSES + 4 * number)) & 0xFFFFFFFF
        if first + size > body.shape[0]:
            return False
        part = body[first : first + size]
        if size and not _apply_class(part, destination, masks[number], given, given_tokens):
            return False
        first += size
    return first == body.shape[0]


@inner
def _apply_class(part: Bytes, destination: Elements, masks: Numbers, given: Bytes, given_tokens: Bytes) -> bool:
    elements = 0
    for group in range(masks.shape[0]):
        elements += ones(masks[group])
    table, large_table = np.empty(TABLE_ENTRIES, np.uint16), np.empty(TABLE_ENTRIES, np.uint16)
    changes, low, at = _open_sparse(part, elements, given, given_tokens, table, large_table)
    return changes != 0 and _apply_changes(
        part, at, changes, low, elements, table, large_table, destination, 0, elements, True, masks
    )


@entry
def apply_bitmap(
    body: Bytes, destination: Elements, elements: int, first: int, last: int, token_lengths: Bytes
) -> bool:
    bitmap_end = 1 + ((elements + 7) >> 3)
    if body.shape[0] < bitmap_end or body[0] > 1:
        return False
    table = np.empty(TABLE_ENTRIES, np.uint16)
    at = _read_table(body, bitmap_end * 8, body[0] == 1, token_lengths, table)
    if at == BAD:
        return False
    for position in range(last):
        if (body[1 + (position >> 3)] >> (position & 7)) & 1:
            is_negative = peek(body, at) & 1
            size, at = _take_size(body, at + 1, table)
            if size == 0:
                return False
            if position >= first:
                step = size if is_negative == 0 else -size
                destination[position - first] = whole(destination[position - first]) + step
    return last < elements or (at + 7) >> 3 == body.shape[0]


@entry
def apply_packed(
    body: Bytes, destination: Elements, elements: int, first: int, last: int, mantissa: int, exponent: int
) -> bool:
    lengths, table = np.empty(1 << exponent, np.uint8), np.empty(TABLE_ENTRIES, np.uint16)
    at = take_lengths(body, 0, lengths)
    if at == BAD or not fill_table(lengths, table):
        return False
    mantissa_mask = (1 << mantissa) - 1
    for position in range(last):
        word = peek(body, at)
        found = whole(table[word & (TABLE_ENTRIES - 1)])
        if found == INVALID:
            return False
        rest = word >> (found & 15)
        at += (found & 15) + mantissa + 1
        if position >= first:
            sign = (rest >> mantissa) & 1
            destination[position - first] = (sign << exponent | found >> 4) << mantissa | (rest & mantissa_mask)
    return last < elements or (at + 7) >> 3 == body.shape[0]
