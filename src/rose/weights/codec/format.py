"""The payload format: header, block directory, modes and constants.

A payload is a header, a directory with one entry per block, and the bodies of the blocks one after another. Elements
are cut into blocks of equal size (the last may be shorter), each coded on its own, so blocks can be decoded in any
order and a row range needs only the blocks it touches. docs/weights-format.md describes every byte.

`parse` trusts nothing: it allocates only what the payload's own length pays for, and whatever it returns has block
ranges inside the payload. The bodies are checked where they are decoded.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rose.errors import RoseError

MAGIC = b"ROSW"
VERSION = 1
HEADER = struct.Struct("<4sBBBBQI")
ENTRY_BYTES = 4
SIZE_BITS = 28  # of a directory entry; the other four are the mode

BLOCK_ELEMENTS = 1 << 20  # code tables cost about 60 bytes a block: half a percent of it at 1 % changed
BLOCK_ELEMENTS_MAX = 1 << 24

CODE_BITS_MAX = 12  # a decoding table of 4096 entries stays in the first-level cache
ROW = 64  # code lengths are written in rows of at most 64 symbols
FAR = 63  # the high part of a gap that stands for all larger ones
LOW_BITS_MAX = 24  # of a gap; a block has no more elements than that
LARGE = 3  # the kind of step that is followed by a token of its own
KINDS = 4  # a step of one, two or three ULPs, or a larger one
SPARSE_HEAD_BYTES = 5  # number of changes, flags
STREAMS = 4  # of a split block, decoded in step: where a code begins depends on the one before, and a core would wait
SPLIT_HEAD_BYTES = 4 * (STREAMS - 1)  # the size of each stream but the last
SPLIT_MANTISSA_BITS = 7  # bf16: with the sign they are a byte
SPLIT_ELEMENTS_MIN = 512  # below, sizes and the ends of streams cost more than a percent
CLASSES = 3  # of magnitudes, when changes are coded by class: two gain 18 %, three 24 %, four 26 %
CONTEXT_HEAD_BYTES = 5 * CLASSES  # their number, the bounds between them, the size of each part
CONTEXT_CHANGES_MIN = 64  # below, tables and sizes cost more than classes gain

Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
Body: TypeAlias = bytes | memoryview


class CodecError(RoseError):
    """A payload that cannot be decoded, or arrays that cannot be encoded. A destination may be half written."""


class Kind(enum.IntEnum):
    """The kind of a payload: a delta needs its base, a full one nothing."""

    DELTA = 0
    FULL = 1


class Mode(enum.IntEnum):
    """The coding of one block."""

    UNCHANGED = 0
    SPARSE = 1
    BITMAP = 2
    FULL = 3
    PACKED = 4
    CONTEXT = 5
    SPLIT = 6


class ElementType(enum.IntEnum):
    """The reading of an element's bits, which numpy holds as unsigned integers."""

    BF16 = 1
    FP16 = 2
    FP32 = 3

    @property
    def storage(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype("<u4" if self is ElementType.FP32 else "<u2")

    @property
    def bits(self) -> int:
        return self.storage.itemsize * 8

    @property
    def exponent_bits(self) -> int:
        return self.bits - 1 - self.mantissa_bits

    @property
    def mantissa_bits(self) -> int:
        return {ElementType.BF16: 7, ElementType.FP16: 10, ElementType.FP32: 23}[self]


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """A parsed header and directory. `offsets` has one entry more than there are blocks."""

    kind: Kind
    element_type: ElementType
    elements: int
    block_elements: int
    modes: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def span(self, block: int) -> tuple[int, int]:
        """Return the first element of a block and the one after its last."""
        first = block * self.block_elements
        return first, min(first + self.block_elements, self.elements)


def typical_symbol_counts() -> list[int]:
    """Return the counts behind the code of blocks that send none of their own: gaps at random, small steps."""
    counts = [0] * (KINDS * ROW)
    weight = 1 << 20
    for high in range(ROW):
        for kind, share in enumerate((28, 2, 1, 1)):
            counts[kind * ROW + high] = weight * share + 1
        weight = weight * 6 // 7
    return counts


def typical_token_counts() -> list[int]:
    """Return the same for tokens: a step of twice the size is half as likely. The last place is not a token."""
    return [((1 << 20) >> (token // 2)) + 1 for token in range(ROW - 1)] + [0]


def block_count(elements: int, block_elements: int) -> int:
    return -(-elements // block_elements)


def parse(payload: bytes | bytearray | memoryview) -> PayloadLayout:
    """Return header and directory, checked against each other and against the payload's length."""
    if len(payload) < HEADER.size:
        raise CodecError(f"a weight payload of {len(payload)} bytes is shorter than its header")
    magic, version, kind, element_type, spare, elements, block_elements = HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise CodecError("these bytes are not a weight payload: they do not begin with its mark")
    if version != VERSION or spare != 0:
        raise CodecError(f"weight payload of format version {version}", hint=f"this ROSE reads version {VERSION}")
    if kind not in set(Kind) or element_type not in set(ElementType):
        raise CodecError(f"weight payload of unknown kind {kind} or element type {element_type}")
    if not 1 <= block_elements <= BLOCK_ELEMENTS_MAX:
        raise CodecError(f"weight payload with blocks of {block_elements} elements")
    blocks = block_count(elements, block_elements)
    if HEADER.size + ENTRY_BYTES * blocks > len(payload):
        raise CodecError(f"a weight payload of {len(payload)} bytes is too short for {blocks} blocks")
    entries = np.frombuffer(payload, "<u4", blocks, HEADER.size).astype(np.int64)
    modes, sizes = entries >> SIZE_BITS, entries & ((1 << SIZE_BITS) - 1)
    offsets = np.concatenate(([0], np.cumsum(sizes))) + HEADER.size + ENTRY_BYTES * blocks
    if offsets[-1] != len(payload):
        raise CodecError(f"a weight payload of {len(payload)} bytes whose blocks end at {offsets[-1]}")
    if np.any(modes > max(Mode)):
        raise CodecError("a weight payload with a block of unknown mode")
    if kind == Kind.FULL and np.isin(modes, [Mode.UNCHANGED, Mode.SPARSE, Mode.BITMAP, Mode.CONTEXT]).any():
        raise CodecError("a full weight payload with a block that needs a base")
    return PayloadLayout(Kind(kind), ElementType(element_type), elements, block_elements, modes, offsets)
