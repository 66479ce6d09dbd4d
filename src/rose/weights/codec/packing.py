"""The compiled encoder: one block in, the smallest body out.

A block is read once. `_collect` compares 64 elements at a time and keeps position and step of every change; all else
works on these lists, which stay in cache. Counts give the exact size of every mode before a bit is written, so only the
smallest is. Hot loops keep the bits not yet written in a register and store eight bytes at a time; `out` is 64 bytes
longer than the full block, and no mode is chosen that would be larger than that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose.weights.codec.contexts import choose_bounds, fill_masks, group_count, rank_changes
from rose.weights.codec.format import (
    CLASSES,
    CONTEXT_CHANGES_MIN,
    CONTEXT_HEAD_BYTES,
    FAR,
    KINDS,
    LARGE,
    ROW,
    SPARSE_HEAD_BYTES,
    Elements,
    Mode,
)
from rose.weights.codec.prefix_codes import (
    Bytes,
    Numbers,
    Table,
    assign_codes,
    code_lengths,
    dot,
    lengths_bits,
    put,
    put_lengths,
)
from rose.weights.codec.words import (
    LANES,
    differing,
    entry,
    inlined,
    inner,
    leading_zeros,
    store_word,
    trailing_zeros,
    whole,
)

Changes = NDArray[np.int32]

UNCHANGED, SPARSE, BITMAP, FULL, PACKED, CONTEXT, _ = (int(mode) for mode in Mode)
OUT_SLACK_BYTES = 64


@inlined
def _bit_length(value: int) -> int:
    return 64 - leading_zeros(value)


@inner
def _collect(base: Elements, new: Elements, half: int, positions: Changes, steps: Changes) -> int:
    """Fill position and wrapped difference of every change; return how many. `half` is half of the type's range."""
    elements, found, first = base.shape[0], 0, 0
    while first + LANES <= elements:
        mask = differing(base, new, first)
        while mask != 0:
            i = first + trailing_zeros(mask)
            mask &= mask - 1
            positions[found] = i
            steps[found] = ((whole(new[i]) - whole(base[i]) + half) & (2 * half - 1)) - half
            found += 1
        first += LANES
    for i in range(first, elements):
        if base[i] != new[i]:
            positions[found] = i
            steps[found] = ((whole(new[i]) - whole(base[i]) + half) & (2 * half - 1)) - half
            found += 1
    return found


@inlined
def _token(size: int) -> int:
    """Return the token of a size: 1, 2 and 3 are tokens 0 to 2; from 4 on every doubling has two tokens."""
    if size <= LARGE:
        return size - 1
    octave = _bit_length(size) - 1
    return LARGE + 2 * (octave - 2) + ((size >> (octave - 1)) & 1)


@inlined
def _raw_bits(token: int) -> int:
    """Return how many bits of a size follow its token."""
    return 0 if token < LARGE else ((token - LARGE) >> 1) + 1


@inner
def _classify(positions: Changes, steps: Changes, low: int, symbols: Bytes, counts: Numbers, tokens: Numbers) -> int:
    """Fill the symbol of every change and the counts of symbols and tokens; return the number of raw size bits."""
    previous, raw = -1, 0
    for j in range(positions.shape[0]):
        position = whole(positions[j])
        high = min((position - previous - 1) >> low, FAR)
        previous = position
        size = abs(whole(steps[j]))
        kind = size - 1
        if size > LARGE:
            kind = LARGE
            token = _token(size)
            tokens[token] += 1
            raw += _raw_bits(token)
        symbol = kind * ROW + high
        counts[symbol] += 1
        symbols[j] = symbol
    return raw


@inner
def _choose_lengths(counts: Numbers, given: Bytes, lengths: Bytes) -> tuple[int, bool]:
    """Choose the cheaper of the given lengths and own ones, which must be sent; return the bits, and whether own."""
    code_lengths(counts, lengths)
    own = dot(counts, lengths) + lengths_bits(lengths)
    as_given = dot(counts, given)
    if own < as_given:
        return own, True
    lengths[:] = given
    return as_given, False


@inner
def _plan(
    positions: Changes, steps: Changes, elements: int, given: Bytes, given_tokens: Bytes,
    symbols: Bytes, counts: Numbers, large: Numbers, lengths: Bytes, large_lengths: Bytes,
) -> tuple[int, int, int]:  # fmt: skip
    """Plan a sparse body; return its size, its flags, and how many raw size bits it has."""
    changes = positions.shape[0]
    low = max(0, _bit_length(elements // changes) - 3)
    far = _bit_length((elements - 1) >> low)
    counts[:] = 0
    large[:] = 0
    raw = _classify(positions, steps, low, symbols, counts, large)
    symbol_bits, own_symbols = _choose_lengths(counts, given, lengths)
    large_bits, own_large = _choose_lengths(large, given_tokens, large_lengths)
    far_count = 0
    for kind in range(KINDS):
        far_count += counts[kind * ROW + FAR]
    bits = symbol_bits + large_bits + changes * (low + 1) + far_count * far + raw
    return SPARSE_HEAD_BYTES + ((bits + 7) >> 3), low | own_symbols << 6 | own_large << 7, raw


@inner
def _write_planned(
    positions: Changes, steps: Changes, elements: int, flags: int,
    symbols: Bytes, lengths: Bytes, large_lengths: Bytes, out: Bytes,
) -> None:  # fmt: skip
    at = put(out, 0, positions.shape[0] | flags << 32, 40)
    at = put_lengths(out, at, lengths) if flags & 64 else at
    at = put_lengths(out, at, large_lengths) if flags & 128 else at
    low = flags & 31
    far = _bit_length((elements - 1) >> low)
    _write_sparse(positions, steps, symbols, low, far, lengths, large_lengths, out, at)


@entry
def encode_block(
    base: Elements, new: Elements, mantissa: int, exponent: int, contexts: bool, given: Bytes, given_tokens: Bytes,
    positions: Changes, steps: Changes, symbols: Bytes, out: Bytes,
) -> tuple[int, int]:  # fmt: skip
    """Write the smallest body to `out`, unless it is FULL; return its mode and size."""
    elements, full_bytes = base.shape[0], base.shape[0] * base.itemsize
    changes = _collect(base, new, 1 << (mantissa + exponent), positions, steps)
    if changes == 0:
        return UNCHANGED, 0
    positions, steps, symbols = positions[:changes], steps[:changes], symbols[:changes]
    counts, large = np.empty(KINDS * ROW, np.int64), np.empty(ROW, np.int64)
    lengths, large_lengths = np.empty(KINDS * ROW, np.uint8), np.empty(ROW, np.uint8)
    sparse_bytes, flags, raw = _plan(
        positions, steps, elements, given, given_tokens, symbols, counts, large, lengths, large_lengths
    )
    all_lengths, all_tokens = np.empty(ROW, np.uint8), large.copy()
    for symbol in range(LARGE * ROW):
        all_tokens[symbol // ROW] += counts[symbol]
    token_bits, own_tokens = _choose_lengths(all_tokens, given_tokens, all_lengths)
    bitmap_bytes = 1 + ((elements + 7) >> 3) + ((token_bits + changes + raw + 7) >> 3)

    smallest = min(sparse_bytes, bitmap_bytes, full_bytes)
    if contexts and changes >= CONTEXT_CHANGES_MIN:
        size = _encode_context(base, positions, steps, mantissa, exponent, given, given_tokens, smallest, out)
        if size:
            return CONTEXT, size
    if smallest == full_bytes:
        return FULL, full_bytes
    if sparse_bytes <= bitmap_bytes:
        _write_planned(positions, steps, elements, flags, symbols, lengths, large_lengths, out)
        return SPARSE, sparse_bytes
    _write_bitmap(positions, steps, elements, own_tokens, all_lengths, out)
    return BITMAP, bitmap_bytes


@inner
def _encode_context(
    base: Elements, positions: Changes, steps: Changes, mantissa: int, exponent: int, given: Bytes, given_tokens: Bytes,
    limit_bytes: int, out: Bytes,
) -> int:  # fmt: skip
    """Write a body with one sparse part per class; return its size, or 0 if it would not be below the limit."""
    changes = positions.shape[0]
    bounds = choose_bounds(base, positions, mantissa, exponent)
    masks = np.empty((CLASSES, group_count(base.shape[0])), np.int64)
    fill_masks(base, bounds, mantissa, exponent, masks)
    ranks, rank_steps = np.empty(changes, np.int32), np.empty(changes, np.int32)
    starts, totals = rank_changes(positions, steps, masks, ranks, rank_steps)
    symbols, counts, large = np.empty(changes, np.uint8), np.empty(KINDS * ROW, np.int64), np.empty(ROW, np.int64)
    lengths, large_lengths = np.empty(KINDS * ROW, np.uint8), np.empty(ROW, np.uint8)
    head = np.zeros(CONTEXT_HEAD_BYTES, np.uint8)
    head[0] = CLASSES
    head[1:CLASSES] = bounds[1:CLASSES]
    end = CONTEXT_HEAD_BYTES
    for number in range(CLASSES):
        first, last, elements = starts[number], starts[number + 1], totals[number]
        if first == last:
            continue
        part, part_steps, part_symbols = ranks[first:last], rank_steps[first:last], symbols[first:last]
        size, flags, _ = _plan(
            part, part_steps, elements, given, given_tokens, part_symbols, counts, large, lengths, large_lengths
        )
        if end + size >= limit_bytes:
            return 0
        _write_planned(part, part_steps, elements, flags, part_symbols, lengths, large_lengths, out[end:])
        for i in range(4):
            head[CLASSES + 4 * number + i] = (size >> (8 * i)) & 255
        end += size
    out[:CONTEXT_HEAD_BYTES] = head
    return end


@inner
def _write_sparse(
    positions: Changes, steps: Changes, symbols: Bytes, low: int, far: int,
    lengths: Bytes, large_lengths: Bytes, out: Bytes, at: int,
) -> None:  # fmt: skip
    codes, large_codes = np.zeros(KINDS * ROW, np.uint16), np.zeros(ROW, np.uint16)
    assign_codes(lengths, codes)
    assign_codes(large_lengths, large_codes)
    low_mask, previous = (1 << low) - 1, -1
    offset, held = at >> 3, at & 7
    waiting = whole(out[offset]) & ((1 << held) - 1)
    for j in range(positions.shape[0]):
        position, step, symbol = whole(positions[j]), whole(steps[j]), whole(symbols[j])
        gap = position - previous - 1
        previous = position
        length = whole(lengths[symbol])
        value = whole(codes[symbol]) | ((gap & low_mask) | (step < 0) << low) << length
        waiting |= value << held
        held += length + low + 1
        store_word(out, offset, waiting)
        offset += held >> 3
        waiting >>= held & ~7
        held &= 7
        if symbol & FAR == FAR or symbol >= LARGE * ROW:
            at = 8 * offset + held
            if symbol & FAR == FAR:
                at = put(out, at, gap >> low, far)
            if symbol >= LARGE * ROW:
                at = _put_size(out, at, abs(step), large_lengths, large_codes)
            offset, held = at >> 3, at & 7
            waiting = whole(out[offset]) & ((1 << held) - 1)


@inlined
def _put_size(out: Bytes, at: int, size: int, lengths: Bytes, codes: Table) -> int:
    token = _token(size)
    raw = _raw_bits(token)
    value = whole(codes[token]) | (size & ((1 << raw) - 1)) << lengths[token]
    return put(out, at, value, whole(lengths[token]) + raw)


@inner
def _write_bitmap(positions: Changes, steps: Changes, elements: int, own: bool, lengths: Bytes, out: Bytes) -> None:
    bitmap_end = 1 + ((elements + 7) >> 3)
    out[0] = own
    out[1 : bitmap_end + 8] = 0
    at = bitmap_end * 8
    at = put_lengths(out, at, lengths) if own else at
    codes = np.zeros(ROW, np.uint16)
    assign_codes(lengths, codes)
    for j in range(positions.shape[0]):
        position, step = whole(positions[j]), whole(steps[j])
        out[1 + (position >> 3)] |= 1 << (position & 7)
        at = put(out, at, step < 0, 1)
        at = _put_size(out, at, abs(step), lengths, codes)


@entry
def encode_full_block(new: Elements, mantissa: int, exponent: int, out: Bytes) -> tuple[int, int]:
    """Write exponents by a prefix code, sign and mantissa as they are; return mode and size like `encode_block`."""
    elements, full_bytes = new.shape[0], new.shape[0] * new.itemsize
    symbols = 1 << exponent
    counts = np.zeros(symbols, np.int64)
    for i in range(elements):
        counts[(whole(new[i]) >> mantissa) & (symbols - 1)] += 1
    lengths, codes = np.empty(symbols, np.uint8), np.zeros(symbols, np.uint16)
    code_lengths(counts, lengths)
    bits = lengths_bits(lengths) + dot(counts, lengths) + elements * (mantissa + 1)
    if (bits + 7) >> 3 >= full_bytes:
        return FULL, full_bytes
    assign_codes(lengths, codes)
    out[0] = 0
    _write_packed(new, mantissa, exponent, lengths, codes, out, put_lengths(out, 0, lengths))
    return PACKED, (bits + 7) >> 3


@inner
def _write_packed(
    new: Elements, mantissa: int, exponent: int, lengths: Bytes, codes: Table, out: Bytes, at: int
) -> None:
    exponent_mask, mantissa_mask = (1 << exponent) - 1, (1 << mantissa) - 1
    offset, held = at >> 3, at & 7
    waiting = whole(out[offset]) & ((1 << held) - 1)
    for i in range(new.shape[0]):
        bits = whole(new[i])
        symbol = (bits >> mantissa) & exponent_mask
        rest = (bits >> (mantissa + exponent)) << mantissa | (bits & mantissa_mask)
        waiting |= (whole(codes[symbol]) | rest << lengths[symbol]) << held
        held += whole(lengths[symbol]) + mantissa + 1
        store_word(out, offset, waiting)
        offset += held >> 3
        waiting >>= held & ~7
        held &= 7
