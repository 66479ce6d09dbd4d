"""The fast implementation of single blocks: compiled, without Python's lock, with memory that is used again.

An instance belongs to one thread. What `encode` returns is the caller's own.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from rose.weights.codec import packing, unpacking
from rose.weights.codec.format import (
    PACKED_TOGETHER,
    Blocks,
    Body,
    Elements,
    ElementType,
    Mode,
    smaller,
    typical_symbol_counts,
    typical_token_counts,
)
from rose.weights.codec.prefix_codes import Bytes, lengths_of
from rose.weights.codec.prefix_codes import Numbers as Offsets


@cache
def _typical() -> tuple[Bytes, Bytes]:
    return lengths_of(np.array(typical_symbol_counts())), lengths_of(np.array(typical_token_counts()))


class KernelBlocks(Blocks):
    """`elements_max` is the largest block that will be encoded; 0 for decoding only."""

    def __init__(self, element_type: ElementType, elements_max: int, contexts: bool = False) -> None:
        self.bits = element_type.mantissa_bits, element_type.exponent_bits
        self.contexts = contexts
        self.positions = np.empty(elements_max, np.int32)
        self.steps = np.empty(elements_max, np.int32)
        self.symbols = np.empty(elements_max, np.uint8)
        self.out = np.empty(elements_max * element_type.storage.itemsize + packing.OUT_SLACK_BYTES, np.uint8)

    def encode(self, base: Elements, new: Elements) -> tuple[Mode, Body]:
        mode, size = packing.encode_block(
            base, new, *self.bits, self.contexts, *_typical(), self.positions, self.steps, self.symbols, self.out
        )
        if mode == Mode.FULL:
            return self.encode_full(new)
        coded = Mode(mode), self.out[:size].tobytes()
        return smaller(coded, self.encode_full(new)) if 2 * size > new.nbytes else coded

    def encode_full(self, new: Elements) -> tuple[Mode, Body]:
        mode, size = packing.encode_full_block(new, *self.bits, self.out)
        return Mode(mode), new.tobytes() if mode == Mode.FULL else self.out[:size].tobytes()

    def apply_together(self, data: Body, offsets: Offsets, destination: Elements, elements: int) -> bool:
        """As many PACKED blocks as `offsets` ends, each whole and of so many elements. False: try them one by one."""
        return unpacking.apply_packed_together(
            np.frombuffer(data, np.uint8), offsets, destination, elements, *self.bits
        )

    def apply(self, mode: Mode, body: Body, destination: Elements, elements: int, first: int) -> bool:
        data, last = np.frombuffer(body, np.uint8), first + len(destination)
        if mode == Mode.SPARSE:
            return unpacking.apply_sparse(data, destination, elements, first, last, *_typical())
        if mode == Mode.BITMAP:
            return unpacking.apply_bitmap(data, destination, elements, first, last, _typical()[1])
        if mode == Mode.PACKED:
            return unpacking.apply_packed(data, destination, elements, first, last, *self.bits)
        if mode == Mode.CONTEXT:
            is_whole = len(destination) == elements
            return is_whole and unpacking.apply_context(data, destination, *self.bits, *_typical())
        if mode == Mode.UNCHANGED:
            return not len(body)
        if len(body) != elements * destination.itemsize:
            return False
        destination[:] = np.frombuffer(body, destination.dtype)[first:last]
        return True


def warm_up(element_type: ElementType = ElementType.BF16, *, to_encode: bool = False) -> None:
    """Compile what decodes, or load what an earlier start compiled: now, rather than under the first versions.

    No body here is a valid one; whoever decodes it says so.
    """
    elements = 64
    coder, held = KernelBlocks(element_type, elements), np.zeros(elements, element_type.storage)
    if to_encode:
        coder.encode(held, held + held.dtype.type(1))
        coder.encode_full(held)
    for mode in Mode:
        coder.apply(mode, bytes(8), held, elements, 0)
    offsets = np.arange(PACKED_TOGETHER + 1) * 8
    coder.apply_together(bytes(8 * PACKED_TOGETHER), offsets, np.tile(held, PACKED_TOGETHER), elements)
