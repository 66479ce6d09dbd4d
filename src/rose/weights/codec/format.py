"""What a payload looks like: header, block directory, modes and the constants both implementations share.

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
from typing import Any, Protocol, TypeAlias

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
    """What a payload needs: a delta needs its base, a full one nothing."""

    DELTA = 0
    FULL = 1


class Mode(enum.IntEnum):
    """How one block is coded."""

    UNCHANGED = 0
    SPARSE = 1
    BITMAP = 2
    FULL = 3
    PACKED = 4
    CONTEXT = 5
    SPLIT = 6


class ElementType(enum.IntEnum):
    """How the bits of an element are to be read; numpy holds them as unsigned integers."""

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
class Layout:
    """A parsed header and directory. `offsets` has one entry more than there are blocks."""

    kind: Kind
    element_type: ElementType
    elements: int
    block_elements: int
    modes: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @property
    def blocks(self) -> int:
        return len(self.modes)

    def span(self, block: int) -> tuple[int, int]:
        """The first element of a block and the one after its last."""
        first = block * self.block_elements
        return first, min(first + self.block_elements, self.elements)


class Blocks(Protocol):
    """Codes single blocks; `reference` and `kernels` are two of them that agree on every byte. Not thread-safe."""

    def encode(self, base: Elements, new: Elements) -> tuple[Mode, Body]: ...

    def encode_full(self, new: Elements) -> tuple[Mode, Body]: ...

    def apply(self, mode: Mode, body: Body, destination: Elements, elements: int, first: int) -> bool:
        """Decode a block of so many elements into the part of it that begins at `first`. False: not a valid body.

        A CONTEXT block needs the whole of its base: its part is all of it.
        """
        ...


def typical_symbol_counts() -> list[int]:
    """The code for symbols that blocks use when one of their own is not worth sending: gaps at random, steps small."""
    counts = [0] * (KINDS * ROW)
    weight = 1 << 20
    for high in range(ROW):
        for kind, share in enumerate((28, 2, 1, 1)):
            counts[kind * ROW + high] = weight * share + 1
        weight = weight * 6 // 7
    return counts


def typical_token_counts() -> list[int]:
    """The same for tokens: every doubling of the size makes a step half as likely. The last place is not a token."""
    return [((1 << 20) >> (token // 2)) + 1 for token in range(ROW - 1)] + [0]


def smaller(coded: tuple[Mode, Body], full: tuple[Mode, Body]) -> tuple[Mode, Body]:
    """Of two bodies for one block. Encoders try the full one once the other is over half the block's size."""
    return coded if len(coded[1]) <= len(full[1]) else full


def block_count(elements: int, block_elements: int) -> int:
    return -(-elements // block_elements)


def low_bits(elements: int, changes: int) -> int:
    """How many bits of a gap are written as they are, so that the mean of the rest lies between 2 and 8.

    Within 2**low_bits neighbours a change is all but equally likely, so coding these bits would gain nothing.
    """
    return max(0, (elements // changes).bit_length() - 3)


def far_bits(elements: int, low: int) -> int:
    """The width of the high part of a gap when it is written out."""
    return ((elements - 1) >> low).bit_length()


def pack_header(kind: Kind, element_type: ElementType, elements: int, block_elements: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, kind, element_type, 0, elements, block_elements)


def pack_entry(mode: int, size_bytes: int) -> bytes:
    return int(mode << SIZE_BITS | size_bytes).to_bytes(ENTRY_BYTES, "little")


def parse(payload: bytes | bytearray | memoryview) -> Layout:
    """Header and directory, checked against each other and against the payload's length."""
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
    layout = Layout(Kind(kind), ElementType(element_type), elements, block_elements, entries >> SIZE_BITS,
                    _offsets(entries & ((1 << SIZE_BITS) - 1)))  # fmt: skip
    _check_directory(layout, len(payload))
    return layout


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.empty(len(sizes) + 1, np.int64)
    offsets[0] = HEADER.size + ENTRY_BYTES * len(sizes)
    np.cumsum(sizes, out=offsets[1:])
    offsets[1:] += offsets[0]
    return offsets


def _check_directory(layout: Layout, payload_bytes: int) -> None:
    if layout.offsets[-1] != payload_bytes:
        raise CodecError(f"a weight payload of {payload_bytes} bytes whose blocks end at {layout.offsets[-1]}")
    if np.any(layout.modes > max(Mode)):
        raise CodecError("a weight payload with a block of unknown mode")
    needs_base = np.isin(layout.modes, [Mode.UNCHANGED, Mode.SPARSE, Mode.BITMAP, Mode.CONTEXT])
    if layout.kind == Kind.FULL and np.any(needs_base):
        raise CodecError("a full weight payload with a block that needs a base")
