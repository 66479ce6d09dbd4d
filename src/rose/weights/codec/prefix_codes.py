"""Compiled prefix codes: code lengths from counts, codes from lengths, decoding tables, lengths on the wire.

A code is known by its lengths: symbols are numbered by (length, symbol), and each code is written lowest bit first, so
that a decoder looks at the next CODE_BITS_MAX bits as one number. Lengths come from package-merge, which is optimal
under a limit on the length; ties are broken by symbol, so that every encoder makes the same bytes.

On the wire lengths come in rows of at most 64. A row is its number of symbols in 7 bits, without the unused ones at
its end, and for each symbol its difference from the last used one (6 at first):

    0 the same     10 one more     110 unused     1110 one less     1111 and the length itself in 4 bits
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose.weights.codec.format import CODE_BITS_MAX, ROW
from rose.weights.codec.words import entry, inlined, inner, load_word, store_word, whole

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]
Table = NDArray[np.uint16]

TABLE_ENTRIES = 1 << CODE_BITS_MAX
INVALID = 0x8000  # a table entry that no code leads to
BAD = -1  # in place of a bit position: the bits cannot be what an encoder wrote
_FIRST_GUESS = 6


@inner
def code_lengths(counts: Numbers, lengths: Bytes) -> None:
    """Fill optimal lengths of at most CODE_BITS_MAX; 0 for symbols that do not occur, 1 for a single symbol."""
    lengths[:] = 0
    keys = np.empty(counts.shape[0], np.int64)  # sorted here: numba's own sort takes seconds to compile
    used = 0
    for symbol in range(counts.shape[0]):
        if counts[symbol]:
            key = counts[symbol] * 256 + symbol
            place = used
            while place > 0 and keys[place - 1] > key:
                keys[place] = keys[place - 1]
                place -= 1
            keys[place] = key
            used += 1
    keys = keys[:used]
    if used <= 1:
        for i in range(used):
            lengths[keys[i] & 255] = 1
        return
    is_leaf = np.empty((CODE_BITS_MAX, 2 * used), np.bool_)
    _merge_packages(keys, is_leaf)
    taken = 2 * used - 2
    for level in range(CODE_BITS_MAX - 1, -1, -1):
        leaves = 0
        for i in range(taken):
            leaves += is_leaf[level, i]
        for i in range(leaves):
            lengths[keys[i] & 255] += 1
        taken = 2 * (taken - leaves)


@inner
def dot(counts: Numbers, lengths: Bytes) -> int:
    """Return how many bits symbols with these counts take."""
    total = 0
    for i in range(counts.shape[0]):
        total += counts[i] * lengths[i]
    return total


@entry
def lengths_of(counts: Numbers) -> Bytes:
    lengths = np.empty(counts.shape[0], np.uint8)
    code_lengths(counts, lengths)
    return lengths


@inner
def _merge_packages(keys: Numbers, is_leaf: NDArray[np.bool_]) -> None:
    """Mark the entries of every level's sorted list that are symbols; the others are pairs of the level before."""
    used = keys.shape[0]
    items = np.empty(2 * used, np.int64)
    before = np.empty(2 * used, np.int64)
    size = 0
    for level in range(CODE_BITS_MAX):
        items, before = before, items
        packages = size // 2
        leaf = package = size = 0
        while leaf < used or package < packages:
            weight = before[2 * package] + before[2 * package + 1] if package < packages else 0
            first_is_leaf = package == packages or (leaf < used and keys[leaf] >> 8 <= weight)
            is_leaf[level, size] = first_is_leaf
            if first_is_leaf:
                items[size] = keys[leaf] >> 8
                leaf += 1
            else:
                items[size] = weight
                package += 1
            size += 1


@inner
def _first_codes(lengths: Bytes) -> Numbers:
    """Return the first code of every length, highest bit first; the entry after the longest is the space used."""
    totals = np.zeros(CODE_BITS_MAX + 2, np.int64)
    for symbol in range(lengths.shape[0]):
        totals[lengths[symbol]] += 1
    totals[0] = 0
    firsts = np.zeros(CODE_BITS_MAX + 2, np.int64)
    for length in range(1, CODE_BITS_MAX + 2):
        firsts[length] = (firsts[length - 1] + totals[length - 1]) << 1
    return firsts


@inner
def _reversed(code: int, length: int) -> int:
    result = 0
    for _ in range(length):
        result = result << 1 | (code & 1)
        code >>= 1
    return result


@inner
def assign_codes(lengths: Bytes, codes: Table) -> None:
    """Fill the code of each used symbol, ready to be written lowest bit first."""
    following = _first_codes(lengths)
    for symbol in range(lengths.shape[0]):
        length = whole(lengths[symbol])
        if length:
            codes[symbol] = _reversed(following[length], length)
            following[length] += 1


@inner
def fill_table(lengths: Bytes, table: Table) -> bool:
    """Fill entries (length in bits 0-3, symbol from bit 4 on); return False if this is no prefix code."""
    following = _first_codes(lengths)
    if following[CODE_BITS_MAX + 1] > 2 * TABLE_ENTRIES:
        return False
    table[:] = INVALID
    for symbol in range(lengths.shape[0]):
        length = whole(lengths[symbol])
        if length:
            for place in range(_reversed(following[length], length), TABLE_ENTRIES, 1 << length):
                table[place] = symbol << 4 | length
            following[length] += 1
    return True


@inlined
def peek(data: Bytes, at: int) -> int:
    """Return at least 57 bits from `at` on; beyond the end come zeros."""
    offset = at >> 3
    if offset + 8 <= data.shape[0]:
        return load_word(data, offset) >> (at & 7)
    word = whole(0)
    for i in range(data.shape[0] - offset):
        word |= whole(data[offset + i]) << (8 * i)
    return word >> (at & 7)


@inlined
def put(data: Bytes, at: int, value: int, bits: int) -> int:
    """Write `bits` <= 56 at bit `at` and clear seven bytes beyond; return the bit after."""
    offset = at >> 3
    kept = whole(data[offset]) & ((1 << (at & 7)) - 1)
    store_word(data, offset, kept | value << (at & 7))
    return at + bits


@inner
def _row_length(lengths: Bytes, first: int) -> int:
    last = min(first + ROW, lengths.shape[0])
    while last > first and lengths[last - 1] == 0:
        last -= 1
    return last - first


@inner
def length_code(length: int, guess: int) -> tuple[int, int]:
    """Return the bits for one length, lowest first, and how many."""
    if length == 0:
        return 0b011, 3
    if length == guess:
        return 0b0, 1
    if length == guess + 1:
        return 0b01, 2
    if length == guess - 1:
        return 0b0111, 4
    return 0b1111 | length << 4, 8


@inner
def lengths_bits(lengths: Bytes) -> int:
    """Return how many bits `put_lengths` writes."""
    total = 0
    for first in range(0, lengths.shape[0], ROW):
        guess = _FIRST_GUESS
        total += 7
        for i in range(first, first + _row_length(lengths, first)):
            length = whole(lengths[i])
            total += length_code(length, guess)[1]
            guess = length if length else guess
    return total


@inner
def put_lengths(data: Bytes, at: int, lengths: Bytes) -> int:
    for first in range(0, lengths.shape[0], ROW):
        guess = _FIRST_GUESS
        size = _row_length(lengths, first)
        at = put(data, at, size, 7)
        for i in range(first, first + size):
            length = whole(lengths[i])
            value, bits = length_code(length, guess)
            at = put(data, at, value, bits)
            guess = length if length else guess
    return at


@inner
def take_length(data: Bytes, at: int, guess: int) -> tuple[int, int]:
    """Return one length and the bit after it; the caller refuses anything but 0 to CODE_BITS_MAX."""
    word = peek(data, at)
    if word & 1 == 0:
        return guess, at + 1
    if word & 2 == 0:
        return guess + 1, at + 2
    if word & 4 == 0:
        return 0, at + 3
    if word & 8 == 0:
        return guess - 1, at + 4
    return (word >> 4) & 15, at + 8


@inner
def take_lengths(data: Bytes, at: int, lengths: Bytes) -> int:
    """Read the lengths; return the bit after them, or BAD."""
    lengths[:] = 0
    for first in range(0, lengths.shape[0], ROW):
        guess = _FIRST_GUESS
        size = peek(data, at) & 127
        at += 7
        if first + size > min(first + ROW, lengths.shape[0]):
            return BAD
        for i in range(first, first + size):
            length, at = take_length(data, at, guess)
            if length < 0 or length > CODE_BITS_MAX:
                return BAD
            lengths[i] = length
            guess = length if length else guess
    return at
