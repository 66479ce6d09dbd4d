"""What others send, as fast as we can make it: every baseline gets compiled loops and the same vector compare as ours.

    full           the weights as they are
    coo            changed positions as int32 and their values as bf16 (the ROSE paper)
    coo_zstd       the same, each stream through zstd level 1
    xor_zstd       the XOR of all bytes through zstd level 1 (slime, SkyRL)
    gap2d_zstd     rows of 4096: row steps as bytes, column steps within a row as uint16, values as bf16, each stream
                   through zstd level 1 (PULSE)

`ours` is the codec as it is by default, `ours_contexts` with changes coded by the magnitude of their base.

A codec holds scratch memory between calls, as a publisher would; decoding changes the destination in place.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np
import zstandard
from numba import njit
from numpy.typing import NDArray

from rose.weights import codec
from rose.weights.codec.words import LANES, differing, trailing_zeros

Bits = NDArray[np.uint16]
COLUMNS = 4096

_compiled: Any = njit(nogil=True)


class Codec(Protocol):
    def encode(self, base: Bits, new: Bits) -> bytes: ...

    def apply(self, payload: bytes, held: Bits) -> None: ...


class Ours:
    def __init__(self, contexts: bool) -> None:
        self.contexts = contexts

    def encode(self, base: Bits, new: Bits) -> bytes:
        return codec.encode(base, new, contexts=self.contexts)

    def apply(self, payload: bytes, held: Bits) -> None:
        codec.apply(payload, held)


class Full:
    def encode(self, base: Bits, new: Bits) -> bytes:
        return new.tobytes()

    def apply(self, payload: bytes, held: Bits) -> None:
        held[:] = np.frombuffer(payload, np.uint16)


@_compiled
def _changes(base, new, positions, values):
    found, first = 0, 0
    while first + LANES <= base.shape[0]:
        mask = differing(base, new, first)
        while mask != 0:
            i = first + trailing_zeros(mask)
            mask &= mask - 1
            positions[found], values[found] = i, new[i]
            found += 1
        first += LANES
    for i in range(first, base.shape[0]):
        if base[i] != new[i]:
            positions[found], values[found] = i, new[i]
            found += 1
    return found


@_compiled
def _scatter(held, positions, values):
    for i in range(positions.shape[0]):
        held[positions[i]] = values[i]


@_compiled
def _steps_2d(positions, rows, columns):
    row = column = np.int32(0)
    for i in range(positions.shape[0]):
        next_row, next_column = positions[i] // COLUMNS, positions[i] % COLUMNS
        rows[i] = min(next_row - row, 255)  # more than 254 rows without a change do not occur in these cases
        columns[i] = next_column - column if next_row == row else next_column
        row, column = next_row, next_column


@_compiled
def _scatter_2d(held, rows, columns, values):
    row = column = np.int64(0)
    for i in range(rows.shape[0]):
        row += rows[i]
        column = column + columns[i] if rows[i] == 0 else np.int64(columns[i])
        held[row * COLUMNS + column] = values[i]


@_compiled
def _xor(left, right, out):
    for i in range(left.shape[0]):
        out[i] = left[i] ^ right[i]


class Streams:
    """Some byte streams end to end behind their sizes, each compressed or not."""

    def __init__(self, level: int | None) -> None:
        self.level = level

    def join(self, *streams: NDArray[Any]) -> bytes:
        pieces: list[Any] = [stream.tobytes() for stream in streams]
        if self.level is not None:
            compressor = zstandard.ZstdCompressor(level=self.level)
            pieces = [compressor.compress(piece) for piece in pieces]
        sizes = struct.pack(f"<{len(pieces)}Q", *map(len, pieces))
        return b"".join([sizes, *pieces])

    def split(self, payload: bytes, *types: Any) -> list[NDArray[Any]]:
        sizes, at, found = struct.unpack_from(f"<{len(types)}Q", payload), 8 * len(types), []
        for size, kind in zip(sizes, types, strict=True):
            piece: Any = memoryview(payload)[at : at + size]
            at += size
            if self.level is not None:
                piece = zstandard.ZstdDecompressor().decompress(piece)
            found.append(np.frombuffer(piece, kind))
        return found


class Coo:
    def __init__(self, elements: int, level: int | None) -> None:
        self.positions, self.values = np.empty(elements, np.int32), np.empty(elements, np.uint16)
        self.streams = Streams(level)

    def encode(self, base: Bits, new: Bits) -> bytes:
        found = _changes(base, new, self.positions, self.values)
        return self.streams.join(self.positions[:found], self.values[:found])

    def apply(self, payload: bytes, held: Bits) -> None:
        _scatter(held, *self.streams.split(payload, np.int32, np.uint16))


class Gap2d:
    def __init__(self, elements: int) -> None:
        self.coo, self.streams = Coo(elements, None), Streams(1)
        self.rows, self.columns = np.empty(elements, np.uint8), np.empty(elements, np.uint16)

    def encode(self, base: Bits, new: Bits) -> bytes:
        found = _changes(base, new, self.coo.positions, self.coo.values)
        _steps_2d(self.coo.positions[:found], self.rows, self.columns)
        return self.streams.join(self.rows[:found], self.columns[:found], self.coo.values[:found])

    def apply(self, payload: bytes, held: Bits) -> None:
        _scatter_2d(held, *self.streams.split(payload, np.uint8, np.uint16, np.uint16))


class XorZstd:
    def __init__(self, elements: int) -> None:
        self.mixed, self.streams = np.empty(elements, np.uint16), Streams(1)

    def encode(self, base: Bits, new: Bits) -> bytes:
        _xor(base, new, self.mixed)
        return self.streams.join(self.mixed)

    def apply(self, payload: bytes, held: Bits) -> None:
        _xor(held, self.streams.split(payload, np.uint16)[0], held)


def codecs(elements: int) -> dict[str, Codec]:
    return {
        "ours": Ours(contexts=False),
        "ours_contexts": Ours(contexts=True),
        "coo": Coo(elements, None),
        "coo_zstd": Coo(elements, 1),
        "xor_zstd": XorZstd(elements),
        "gap2d_zstd": Gap2d(elements),
        "full": Full(),
    }
