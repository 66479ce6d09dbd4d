"""The slow and obvious implementation of single blocks: lists, numpy and texts of bits. What the fast one must equal.

Bits are kept as texts of "0" and "1" in the order they are written; byte i of a body holds bits 8i to 8i + 7, the first
in its lowest place. Nothing here is shared with the compiled code but the constants in `format`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from rose.weights.codec import deltas
from rose.weights.codec.format import (
    CLASSES,
    CODE_BITS_MAX,
    CONTEXT_CHANGES_MIN,
    CONTEXT_HEAD_BYTES,
    FAR,
    KINDS,
    LARGE,
    LOW_BITS_MAX,
    ROW,
    SPARSE_HEAD_BYTES,
    SPLIT_ELEMENTS_MIN,
    SPLIT_HEAD_BYTES,
    SPLIT_MANTISSA_BITS,
    STREAMS,
    Body,
    Elements,
    ElementType,
    Mode,
    typical_symbol_counts,
    typical_token_counts,
)


def low_bits(elements: int, changes: int) -> int:
    """How many bits of a gap are written as they are, so that the mean of the rest lies between 2 and 8.

    Within 2**low_bits neighbours a change is all but equally likely, so coding these bits would gain nothing.
    """
    return max(0, (elements // changes).bit_length() - 3)


def far_bits(elements: int, low: int) -> int:
    """The width of the high part of a gap when it is written out."""
    return ((elements - 1) >> low).bit_length()


def smaller(coded: tuple[Mode, Body], full: tuple[Mode, Body]) -> tuple[Mode, Body]:
    """Of two bodies for one block. Encoders try the full one once the other is over half the block's size."""
    return coded if len(coded[1]) <= len(full[1]) else full


@contextmanager
def reference_blocks() -> Iterator[None]:
    """Replace the compiled coder by this one."""
    with mock.patch.object(deltas, "_kernels", return_value=ReferenceBlocks):
        yield


class _BadBytes(Exception):
    """These bytes are not what an encoder wrote."""


def bits_of(value: int, width: int) -> str:
    """`width` bits of a number, the lowest first."""
    return format(value, f"0{width}b")[::-1] if width else ""


def bytes_of(bits: str) -> bytes:
    padded = bits + "0" * (-len(bits) % 8)
    return bytes(int(padded[i : i + 8][::-1], 2) for i in range(0, len(padded), 8))


class Reader:
    """Takes bits from the front of some bytes; beyond the end there are zeros."""

    def __init__(self, body: bytes) -> None:
        self.bits = "".join(bits_of(byte, 8) for byte in body)
        self.at = 0

    def take(self, width: int) -> int:
        taken = self.bits[self.at : self.at + width].ljust(width, "0")
        self.at += width
        return int(taken[::-1], 2) if width else 0

    def take_symbol(self, codes: dict[str, int]) -> int:
        code = ""
        while code not in codes:
            if len(code) == CODE_BITS_MAX:
                raise _BadBytes
            code += str(self.take(1))
        return codes[code]

    def finish(self) -> None:
        if -(-self.at // 8) != len(self.bits) // 8:
            raise _BadBytes


def code_lengths(counts: Sequence[int]) -> list[int]:
    """Package-merge: the cheapest code lengths of at most CODE_BITS_MAX. A package is (weight, symbols in it)."""
    leaves = [(count, [symbol]) for count, symbol in sorted((c, s) for s, c in enumerate(counts) if c)]
    lengths = [0] * len(counts)
    if len(leaves) == 1:
        lengths[leaves[0][1][0]] = 1
        return lengths
    items: list[tuple[int, list[int]]] = []
    for _ in range(CODE_BITS_MAX):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(items[::2], items[1::2], strict=False)]
        items = sorted(leaves + pairs, key=lambda item: item[0])  # stable: of equals, symbols come before pairs
    for _, symbols in items[: max(0, 2 * len(leaves) - 2)]:
        for symbol in symbols:
            lengths[symbol] += 1
    return lengths


def codes_of(lengths: Sequence[int]) -> dict[int, str]:
    """The code of every used symbol, in the order its bits are written."""
    if sum(2.0**-length for length in lengths if length) > 1:
        raise _BadBytes
    codes, following, previous = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        following <<= length - previous
        codes[symbol] = format(following, f"0{length}b")
        following, previous = following + 1, length
    return codes


def write_lengths(lengths: Sequence[int]) -> str:
    bits = ""
    for first in range(0, len(lengths), ROW):
        row, guess = list(lengths[first : first + ROW]), 6
        while row and row[-1] == 0:
            row.pop()
        bits += bits_of(len(row), 7)
        for length in row:
            known = {guess - 1: "1110", guess + 1: "10", guess: "0", 0: "110"}
            bits += known.get(length, "1111" + bits_of(length, 4))
            guess = length or guess
    return bits


def read_lengths(reader: Reader, symbols: int) -> list[int]:
    lengths: list[int] = []
    for first in range(0, symbols, ROW):
        room, guess = min(ROW, symbols - first), 6
        size = reader.take(7)
        if size > room:
            raise _BadBytes
        for _ in range(size):
            length = _read_length(reader, guess)
            if not 0 <= length <= CODE_BITS_MAX:
                raise _BadBytes
            lengths.append(length)
            guess = length or guess
        lengths += [0] * (room - size)
    return lengths


def _read_length(reader: Reader, guess: int) -> int:
    for answer in (guess, guess + 1, 0, guess - 1):
        if reader.take(1) == 0:
            return answer
    return reader.take(4)


def token_of(size: int) -> tuple[int, str]:
    """The token of a step's size and the bits that follow it."""
    if size <= LARGE:
        return size - 1, ""
    octave = size.bit_length() - 1
    raw = octave - 1
    return LARGE + 2 * (octave - 2) + (size >> raw & 1), bits_of(size & ((1 << raw) - 1), raw)


def size_of(token: int, reader: Reader) -> int:
    if token < LARGE:
        return token + 1
    raw = (token - LARGE) // 2 + 1
    return (2 + (token - LARGE) % 2 << raw) + reader.take(raw)


@cache
def typical_symbol_lengths() -> list[int]:
    return code_lengths(typical_symbol_counts())


@cache
def typical_token_lengths() -> list[int]:
    return code_lengths(typical_token_counts())


def _coded(symbols: Sequence[int], count: int, typical: Sequence[int]) -> tuple[bool, str, dict[int, str]]:
    """Whether own lengths are worth sending, these lengths as bits, and the codes."""
    counts = [0] * count
    for symbol in symbols:
        counts[symbol] += 1
    own = code_lengths(counts)
    cost_own = len(write_lengths(own)) + sum(c * length for c, length in zip(counts, own, strict=True))
    if cost_own < sum(c * length for c, length in zip(counts, typical, strict=True)):
        return True, write_lengths(own), codes_of(own)
    return False, "", codes_of(typical)


def sparse_body(positions: list[int], steps: list[int], elements: int) -> bytes:
    low = low_bits(elements, len(positions))
    far = far_bits(elements, low)
    gaps = [position - before - 1 for position, before in zip(positions, [-1, *positions], strict=False)]
    tokens = [token_of(abs(step)) for step in steps]
    symbols = [ROW * min(token, LARGE) + min(gap >> low, FAR) for gap, (token, _) in zip(gaps, tokens, strict=True)]
    large = [token for token, _ in tokens if token >= LARGE]
    own_symbols, symbol_lengths, codes = _coded(symbols, KINDS * ROW, typical_symbol_lengths())
    own_large, large_lengths, large_codes = _coded(large, ROW, typical_token_lengths())
    pieces = [symbol_lengths, large_lengths]
    for gap, step, symbol, (token, raw) in zip(gaps, steps, symbols, tokens, strict=True):
        pieces += [codes[symbol], bits_of(gap & ((1 << low) - 1), low), bits_of(step < 0, 1)]
        pieces += [bits_of(gap >> low, far)] if symbol % ROW == FAR else []
        pieces += [large_codes[token], raw] if token >= LARGE else []
    flags = low | own_symbols << 6 | own_large << 7
    return len(positions).to_bytes(4, "little") + bytes([flags]) + bytes_of("".join(pieces))


def bitmap_body(positions: list[int], steps: list[int], elements: int) -> bytes:
    is_changed = np.zeros(elements, bool)
    is_changed[positions] = True
    tokens = [token_of(abs(step)) for step in steps]
    own, lengths, codes = _coded([token for token, _ in tokens], ROW, typical_token_lengths())
    pieces = [lengths]
    for step, (token, raw) in zip(steps, tokens, strict=True):
        pieces += [bits_of(step < 0, 1), codes[token], raw]
    return bytes([own]) + np.packbits(is_changed, bitorder="little").tobytes() + bytes_of("".join(pieces))


def read_sparse(body: bytes, elements: int, first: int, last: int) -> dict[int, int]:
    """The step at every changed position of a window."""
    reader = Reader(body)
    changes, low, spare = reader.take(32), reader.take(5), reader.take(1)
    own_symbols, own_large = reader.take(1), reader.take(1)
    if len(body) < SPARSE_HEAD_BYTES or not 1 <= changes <= elements or spare or low > LOW_BITS_MAX:
        raise _BadBytes
    symbols = _symbols(read_lengths(reader, KINDS * ROW) if own_symbols else typical_symbol_lengths())
    large = _symbols(read_lengths(reader, ROW) if own_large else typical_token_lengths())
    steps: dict[int, int] = {}
    position = -1
    for _ in range(changes):
        token, high = divmod(reader.take_symbol(symbols), ROW)
        low_part, is_negative = reader.take(low), reader.take(1)
        high = reader.take(far_bits(elements, low)) if high == FAR else high
        size = size_of(reader.take_symbol(large) if token == LARGE else token, reader)
        position += (high << low) + low_part + 1
        if position >= last:
            if last < elements:
                return steps
            raise _BadBytes
        if position >= first:
            steps[position] = -size if is_negative else size
    reader.finish()
    return steps


def read_bitmap(body: bytes, elements: int, first: int, last: int) -> dict[int, int]:
    bitmap_end = 1 + (elements + 7) // 8
    if len(body) < bitmap_end or body[0] > 1:
        raise _BadBytes
    is_changed = np.unpackbits(np.frombuffer(body, np.uint8)[1:bitmap_end], bitorder="little", count=elements)
    reader = Reader(body)
    reader.at = bitmap_end * 8
    tokens = _symbols(read_lengths(reader, ROW) if body[0] else typical_token_lengths())
    steps = {}
    for position in np.flatnonzero(is_changed[:last]).tolist():
        is_negative = reader.take(1)
        size = size_of(reader.take_symbol(tokens), reader)
        if position >= first:
            steps[position] = -size if is_negative else size
    if last == elements:
        reader.finish()
    return steps


def split_body(bits: Sequence[int]) -> bytes:
    """Of bf16: the exponents in four streams, then a byte per element with its sign and mantissa."""
    exponents, size = [number >> 7 & 255 for number in bits], -(-len(bits) // STREAMS)
    lengths = code_lengths([exponents.count(symbol) for symbol in range(256)])
    codes = codes_of(lengths)
    parts = [exponents[stream * size : (stream + 1) * size] for stream in range(STREAMS)]
    streams = [bytes_of("".join(codes[symbol] for symbol in part)) for part in parts]
    sizes = b"".join(len(stream).to_bytes(4, "little") for stream in streams[:-1])
    rest = bytes(number >> 8 & 128 | number & 127 for number in bits)
    return sizes + bytes_of(write_lengths(lengths)) + b"".join(streams) + rest


def read_split(body: bytes, elements: int) -> list[int]:
    if len(body) < SPLIT_HEAD_BYTES + elements:
        raise _BadBytes
    reader = Reader(body)
    sizes = [reader.take(32) for _ in range(STREAMS - 1)]
    symbols = _symbols(read_lengths(reader, 256))
    edges = [-(-reader.at // 8)]
    for size in sizes:
        edges.append(edges[-1] + size)
    edges.append(len(body) - elements)
    if edges[-2] > edges[-1]:
        raise _BadBytes
    exponents: list[int] = []
    for first, after in pairwise(edges):
        stream = Reader(body[first:after])
        count = min(-(-elements // STREAMS), elements - len(exponents))
        exponents += [stream.take_symbol(symbols) for _ in range(count)]
        stream.finish()
    rest = body[len(body) - elements :]
    return [(low & 128) << 8 | symbol << 7 | low & 127 for symbol, low in zip(exponents, rest, strict=True)]


def _symbols(lengths: Sequence[int]) -> dict[str, int]:
    return {code: symbol for symbol, code in codes_of(lengths).items()}


def context_bounds(changed: NDArray[np.int64], exponents: int) -> list[int]:
    """The exponents at which a class ends, so that each has about as many changes."""
    below = [int(np.count_nonzero(changed < value)) for value in range(exponents)]
    wanted = [number * len(changed) for number in range(1, CLASSES)]
    return [next((e for e in range(exponents) if below[e] * CLASSES >= least), exponents - 1) for least in wanted]


def _members(exponents: NDArray[np.int64], bounds: list[int]) -> list[NDArray[np.int64]]:
    """The positions of the elements of each class: an element is in the first class whose bound is above it."""
    classes, edges = np.full(len(exponents), CLASSES - 1), list(enumerate(bounds))
    for number, bound in reversed(edges):
        classes[exponents < bound] = number
    return [np.flatnonzero(classes == number) for number in range(CLASSES)]


class ReferenceBlocks:
    def __init__(self, element_type: ElementType, elements_max: int = 0, contexts: bool = False) -> None:
        self.element_type = element_type
        self.contexts = contexts

    def encode(self, base: Elements, new: Elements) -> tuple[Mode, Body]:
        positions = np.flatnonzero(base != new)
        if not len(positions):
            return Mode.UNCHANGED, b""
        signed = np.dtype(f"i{base.itemsize}")
        steps = (new[positions] - base[positions]).view(signed).tolist()
        sparse = sparse_body(positions.tolist(), steps, len(base))
        bitmap = bitmap_body(positions.tolist(), steps, len(base))
        coded = (Mode.SPARSE, sparse) if len(sparse) <= len(bitmap) else (Mode.BITMAP, bitmap)
        if self.contexts and len(positions) >= CONTEXT_CHANGES_MIN:
            context = self._context_body(base, new)
            coded = (Mode.CONTEXT, context) if len(context) < min(len(coded[1]), new.nbytes) else coded
        if len(coded[1]) >= new.nbytes:
            return self.encode_full(new)
        return smaller(coded, self.encode_full(new)) if 2 * len(coded[1]) > new.nbytes else coded

    def _exponents(self, bits: Elements) -> NDArray[np.int64]:
        return bits.astype(np.int64) >> self.element_type.mantissa_bits & ((1 << self.element_type.exponent_bits) - 1)

    def _context_body(self, base: Elements, new: Elements) -> bytes:
        exponents = self._exponents(base)
        bounds = context_bounds(exponents[base != new], 1 << self.element_type.exponent_bits)
        parts = []
        for members in _members(exponents, bounds):
            positions = np.flatnonzero(base[members] != new[members])
            steps = (new[members] - base[members])[positions].view(np.dtype(f"i{base.itemsize}"))
            part = sparse_body(positions.tolist(), steps.tolist(), len(members)) if len(positions) else b""
            parts.append(part)
        sizes = b"".join(len(part).to_bytes(4, "little") for part in parts)
        return bytes([CLASSES, *bounds]) + sizes + b"".join(parts)

    def encode_full(self, new: Elements) -> tuple[Mode, Body]:
        mantissa, exponent = self.element_type.mantissa_bits, self.element_type.exponent_bits
        if mantissa == SPLIT_MANTISSA_BITS and len(new) >= SPLIT_ELEMENTS_MIN:
            split = split_body(new.tolist())
            return (Mode.FULL, new.tobytes()) if len(split) >= new.nbytes else (Mode.SPLIT, split)
        exponents = [bits >> mantissa & ((1 << exponent) - 1) for bits in new.tolist()]
        lengths = code_lengths([exponents.count(symbol) for symbol in range(1 << exponent)])
        codes = codes_of(lengths)
        pieces = [write_lengths(lengths)]
        for bits, symbol in zip(new.tolist(), exponents, strict=True):
            rest = bits_of(bits & ((1 << mantissa) - 1), mantissa) + bits_of(bits >> mantissa + exponent, 1)
            pieces += [codes[symbol], rest]
        packed = bytes_of("".join(pieces))
        return (Mode.FULL, new.tobytes()) if len(packed) >= new.nbytes else (Mode.PACKED, packed)

    def apply(self, mode: Mode, body: Body, destination: Elements, elements: int, first: int) -> bool:
        try:
            self._apply(mode, bytes(body), destination, elements, first, first + len(destination))
        except _BadBytes:
            return False
        return True

    def _apply(self, mode: Mode, body: bytes, destination: Elements, elements: int, first: int, last: int) -> None:
        if mode in (Mode.SPARSE, Mode.BITMAP):
            read = read_sparse if mode == Mode.SPARSE else read_bitmap
            for position, step in read(body, elements, first, last).items():
                kept = (1 << self.element_type.bits) - 1
                destination[position - first] = (int(destination[position - first]) + step) & kept
        elif mode == Mode.CONTEXT:
            self._apply_context(body, destination, elements)
        elif mode == Mode.PACKED:
            destination[:] = self._read_packed(body, elements, last)[first:]
        elif mode == Mode.SPLIT and self.element_type.mantissa_bits == SPLIT_MANTISSA_BITS:
            destination[:] = read_split(body, elements)[first:last]
        elif mode == Mode.SPLIT or len(body) != (elements * destination.itemsize if mode == Mode.FULL else 0):
            raise _BadBytes
        elif mode == Mode.FULL:
            destination[:] = np.frombuffer(body, destination.dtype)[first:last]

    def _apply_context(self, body: bytes, destination: Elements, elements: int) -> None:
        if len(body) < CONTEXT_HEAD_BYTES or body[0] != CLASSES or len(destination) != elements:
            raise _BadBytes
        bounds, at = list(body[1:CLASSES]), CONTEXT_HEAD_BYTES
        if max(bounds) >= 1 << self.element_type.exponent_bits:
            raise _BadBytes
        kept = (1 << self.element_type.bits) - 1
        for number, members in enumerate(_members(self._exponents(destination), bounds)):
            size = int.from_bytes(body[CLASSES + 4 * number :][:4], "little")
            if at + size > len(body):
                raise _BadBytes
            steps = read_sparse(body[at : at + size], len(members), 0, len(members)) if size else {}
            for rank, step in steps.items():
                destination[members[rank]] = (int(destination[members[rank]]) + step) & kept
            at += size
        if at != len(body):
            raise _BadBytes

    def _read_packed(self, body: bytes, elements: int, last: int) -> list[int]:
        mantissa, exponent = self.element_type.mantissa_bits, self.element_type.exponent_bits
        reader = Reader(body)
        symbols = _symbols(read_lengths(reader, 1 << exponent))
        found = []
        for _ in range(last):
            symbol, low, sign = reader.take_symbol(symbols), reader.take(mantissa), reader.take(1)
            found.append((sign << exponent | symbol) << mantissa | low)
        if last == elements:
            reader.finish()
        return found
