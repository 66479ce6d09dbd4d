"""Whole bf16 weights, compiled: exponents by a prefix code in four streams, sign and mantissa as a byte each.

Exponents of weights take two to three bits, so the next 12 bits of a stream hold several codes: a table gives up to
three symbols and their bits at one look. Four streams are read in step, because a code begins where the one before
ends, and a core would wait. The uncoded bytes are joined many numbers at a time. As in `unpacking`, no input is
trusted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose.weights.codec.format import CODE_BITS_MAX, SPLIT_HEAD_BYTES, SPLIT_MANTISSA_BITS, STREAMS, Elements
from rose.weights.codec.prefix_codes import (
    BAD,
    INVALID,
    TABLE_ENTRIES,
    Bytes,
    Numbers,
    Table,
    assign_codes,
    code_lengths,
    dot,
    fill_table,
    lengths_bits,
    peek,
    put_lengths,
    take_lengths,
)
from rose.weights.codec.words import entry, inlined, inner, store_word, whole

Runs = NDArray[np.uint32]

RUN_MAX = 3  # symbols in an entry of 32 bits
NO_RUN = 64  # the entry that no code leads to
PART_ELEMENTS = 2048  # of each stream: with the tables they stay in the first-level cache


@entry
def encode_split(new: Elements, out: Bytes) -> int:
    """Write the body to `out`; return its size, or 0 if it would not be smaller than the block."""
    elements = new.shape[0]
    stream_elements = (elements + STREAMS - 1) // STREAMS
    counts, total = np.zeros((STREAMS, 256), np.int64), np.zeros(256, np.int64)
    lengths, codes = np.empty(256, np.uint8), np.zeros(256, np.uint16)
    for stream in range(STREAMS):
        for i in range(stream * stream_elements, min((stream + 1) * stream_elements, elements)):
            counts[stream, (whole(new[i]) >> SPLIT_MANTISSA_BITS) & 255] += 1
        for symbol in range(256):
            total[symbol] += counts[stream, symbol]
    code_lengths(total, lengths)
    size = SPLIT_HEAD_BYTES + ((lengths_bits(lengths) + 7) >> 3) + elements
    for stream in range(STREAMS):
        size += (dot(counts[stream], lengths) + 7) >> 3
    if size >= 2 * elements:
        return 0
    assign_codes(lengths, codes)
    _write_split(new, stream_elements, lengths, codes, out)
    return size


@inner
def _write_split(new: Elements, stream_elements: int, lengths: Bytes, codes: Table, out: Bytes) -> None:
    """Write all streams; each ends in a few bytes that the next one writes over."""
    out[SPLIT_HEAD_BYTES] = 0
    offset = (put_lengths(out, 8 * SPLIT_HEAD_BYTES, lengths) + 7) >> 3
    for stream in range(STREAMS):
        first = offset
        part = new[stream * stream_elements : (stream + 1) * stream_elements]
        offset = _write_codes(part, lengths, codes, out, offset)
        if stream < STREAMS - 1:
            for i in range(4):
                out[4 * stream + i] = ((offset - first) >> (8 * i)) & 255
    for i in range(new.shape[0]):
        bits = whole(new[i])
        out[offset + i] = ((bits >> 8) & 128) | (bits & 127)


@inner
def _write_codes(new: Elements, lengths: Bytes, codes: Table, out: Bytes, offset: int) -> int:
    """Write codes from a byte on; return the byte after them. Four codes and what waits fit into a word."""
    both = np.empty(256, np.int64)
    for symbol in range(256):
        both[symbol] = whole(codes[symbol]) << 4 | whole(lengths[symbol])
    waiting, held, last = whole(0), whole(0), new.shape[0] - new.shape[0] % 4
    for first in range(0, last, 4):
        for i in range(4):
            waiting, held = _append(new[first + i], both, waiting, held)
        store_word(out, offset, waiting)
        offset += held >> 3
        waiting >>= held & ~7
        held &= 7
    for i in range(last, new.shape[0]):
        waiting, held = _append(new[i], both, waiting, held)
    store_word(out, offset, waiting)
    return offset + ((held + 7) >> 3)


@inlined
def _append(bits: int, both: Numbers, waiting: int, held: int) -> tuple[int, int]:
    found = whole(both[(whole(bits) >> SPLIT_MANTISSA_BITS) & 255])
    return waiting | (found >> 4) << held, held + (found & 15)


@inner
def _fill_runs(table: Table, runs: Runs) -> None:
    """Fill entries: the bits taken in bits 0-3, how many codes in 4-5, NO_RUN, and symbols from bit 8 on."""
    for i in range(TABLE_ENTRIES):
        taken, count, symbols = whole(0), whole(0), whole(0)
        while count < RUN_MAX:
            found = whole(table[i >> taken])
            if found == INVALID or taken + (found & 15) > CODE_BITS_MAX:
                break
            symbols |= (found >> 4) << (8 * count)
            taken += found & 15
            count += 1
        runs[i] = symbols << 8 | count << 4 | taken if count else NO_RUN


@inlined
def _take_runs(body: Bytes, at: int, runs: Runs, out: Bytes, position: int) -> tuple[int, int, int]:
    """Take four runs at one look; return the bit and the place after them, and NO_RUN if one is none."""
    word, seen = peek(body, at), whole(0)
    for _ in range(4):
        found = whole(runs[word & (TABLE_ENTRIES - 1)])
        store_word(out, position, found >> 8)
        position += (found >> 4) & 3
        word >>= found & 15
        at += found & 15
        seen |= found
    return at, position, seen & NO_RUN


@inner
def _take_rest(body: Bytes, at: int, table: Table, out: Bytes, position: int, stop: int) -> int:
    """Take one symbol after the other; return the bit after them, or BAD."""
    while position < stop:
        found = whole(table[peek(body, at) & (TABLE_ENTRIES - 1)])
        if found == INVALID:
            return BAD
        out[position] = found >> 4
        at += found & 15
        position += 1
    return at


@inner
def _take_part(body: Bytes, ats: Numbers, counts: Numbers, table: Table, runs: Runs, out: Bytes) -> bool:
    """Take `counts` symbols of each stream, in step as long as none of them is near its end."""
    last = counts[STREAMS - 1] - 4 * RUN_MAX  # the last stream is never longer than the others
    out_a, out_b, out_c, out_d = out[0], out[1], out[2], out[3]
    at_a, at_b, at_c, at_d = ats[0], ats[1], ats[2], ats[3]
    a = b = c = d = whole(0)
    while a <= last and b <= last and c <= last and d <= last:
        at_a, a, no_a = _take_runs(body, at_a, runs, out_a, a)
        at_b, b, no_b = _take_runs(body, at_b, runs, out_b, b)
        at_c, c, no_c = _take_runs(body, at_c, runs, out_c, c)
        at_d, d, no_d = _take_runs(body, at_d, runs, out_d, d)
        if no_a | no_b | no_c | no_d:
            return False
    ats[0] = _take_rest(body, at_a, table, out_a, a, counts[0])
    ats[1] = _take_rest(body, at_b, table, out_b, b, counts[1])
    ats[2] = _take_rest(body, at_c, table, out_c, c, counts[2])
    ats[3] = _take_rest(body, at_d, table, out_d, d, counts[3])
    return ats[0] != BAD and ats[1] != BAD and ats[2] != BAD and ats[3] != BAD


@inner
def _open_split(body: Bytes, elements: int, table: Table, ends: Numbers) -> int:
    """Fill the table and the byte after each stream; return where the first one begins, or BAD."""
    lengths = np.empty(256, np.uint8)
    if body.shape[0] < SPLIT_HEAD_BYTES + elements:
        return BAD
    at = take_lengths(body, 8 * SPLIT_HEAD_BYTES, lengths)
    if at == BAD or not fill_table(lengths, table):
        return BAD
    first = end = (at + 7) >> 3
    for stream in range(STREAMS - 1):
        end += peek(body, 32 * stream) & 0xFFFFFFFF
        ends[stream] = end
    ends[STREAMS - 1] = body.shape[0] - elements
    return BAD if end > ends[STREAMS - 1] else first


@entry
def apply_split(body: Bytes, destination: Elements, elements: int, first: int, last: int) -> bool:
    """Decode the whole block, a part of every stream at a time, and join it to the uncoded bytes."""
    table, runs = np.empty(TABLE_ENTRIES, np.uint16), np.empty(TABLE_ENTRIES, np.uint32)
    ats, ends, counts = np.empty(STREAMS, np.int64), np.empty(STREAMS, np.int64), np.empty(STREAMS, np.int64)
    begin = _open_split(body, elements, table, ends)
    if begin == BAD:
        return False
    _fill_runs(table, runs)
    for stream in range(STREAMS):
        ats[stream] = 8 * (ends[stream - 1] if stream else begin)
    rest, symbols = body[body.shape[0] - elements :], np.empty((STREAMS, PART_ELEMENTS + 8), np.uint8)
    stream_elements = (elements + STREAMS - 1) // STREAMS
    for done in range(0, stream_elements, PART_ELEMENTS):
        for stream in range(STREAMS):
            there = min(stream_elements, elements - stream * stream_elements) - done
            counts[stream] = max(0, min(PART_ELEMENTS, there))
        if not _take_part(body, ats, counts, table, runs, symbols):
            return False
        for stream in range(STREAMS):
            begin = stream * stream_elements + done
            low, high = max(begin, first), min(begin + counts[stream], last)
            if low < high:
                _join(
                    rest[low:high], symbols[stream, low - begin : high - begin], destination[low - first : high - first]
                )
    is_right = True
    for stream in range(STREAMS):
        is_right &= (ats[stream] + 7) >> 3 == ends[stream]
    return is_right


@inner
def _join(rest: Bytes, exponents: Bytes, destination: Elements) -> None:
    for i in range(destination.shape[0]):
        bits = whole(rest[i])
        destination[i] = (bits & 128) << 8 | whole(exponents[i]) << SPLIT_MANTISSA_BITS | (bits & 127)
