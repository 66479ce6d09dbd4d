"""The compiled coder of single blocks, which works without Python's lock and uses its memory again.

An instance belongs to one thread; the caller owns what `encode` returns. Arrays that are only read are passed as
read-only, since numba would compile everything once more for arrays that may be written.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.weights.codec import packing, splitting, unpacking
from rose.weights.codec.format import (
    SPLIT_ELEMENTS_MIN,
    SPLIT_MANTISSA_BITS,
    Body,
    Elements,
    ElementType,
    Mode,
    typical_symbol_counts,
    typical_token_counts,
)
from rose.weights.codec.prefix_codes import Bytes, lengths_of


@cache
def _typical() -> tuple[Bytes, Bytes]:
    return lengths_of(np.array(typical_symbol_counts())), lengths_of(np.array(typical_token_counts()))


class KernelBlocks:
    """The coder of blocks of up to `elements_max` elements; 0 is for decoding only."""

    def __init__(self, element_type: ElementType, elements_max: int, contexts: bool = False) -> None:
        self.bits = element_type.mantissa_bits, element_type.exponent_bits
        self.contexts = contexts
        self.positions = np.empty(elements_max, np.int32)
        self.steps = np.empty(elements_max, np.int32)
        self.symbols = np.empty(elements_max, np.uint8)
        self.out = np.empty(elements_max * element_type.storage.itemsize + packing.OUT_SLACK_BYTES, np.uint8)

    def encode(self, base: Elements, new: Elements) -> tuple[Mode, Body]:
        mode, size = packing.encode_block(
            _read_only(base), _read_only(new), *self.bits, self.contexts, *_typical(),
            self.positions, self.steps, self.symbols, self.out,
        )  # fmt: skip
        if mode == Mode.FULL:
            return self.encode_full(new)
        coded = Mode(mode), self.out[:size].tobytes()
        full = self.encode_full(new) if 2 * size > new.nbytes else None  # tried once it may be smaller
        return coded if full is None or size <= len(full[1]) else full

    def encode_full(self, new: Elements) -> tuple[Mode, Body]:
        if self.bits[0] == SPLIT_MANTISSA_BITS and len(new) >= SPLIT_ELEMENTS_MIN:
            size = splitting.encode_split(_read_only(new), self.out)
            return (Mode.SPLIT, self.out[:size].tobytes()) if size else (Mode.FULL, new.tobytes())
        mode, size = packing.encode_full_block(_read_only(new), *self.bits, self.out)
        return Mode(mode), new.tobytes() if mode == Mode.FULL else self.out[:size].tobytes()

    # The destination is the part of the block that begins at `first`; False means that this is not a valid body.
    def apply(self, mode: Mode, body: Body, destination: Elements, elements: int, first: int) -> bool:
        data, last = _read_only(np.frombuffer(body, np.uint8)), first + len(destination)
        if mode == Mode.SPARSE:
            return unpacking.apply_sparse(data, destination, elements, first, last, *_typical())
        if mode == Mode.BITMAP:
            return unpacking.apply_bitmap(data, destination, elements, first, last, _typical()[1])
        if mode == Mode.PACKED:
            return unpacking.apply_packed(data, destination, elements, first, last, *self.bits)
        if mode == Mode.SPLIT:
            is_byte = self.bits[0] == SPLIT_MANTISSA_BITS
            return is_byte and splitting.apply_split(data, destination, elements, first, last)
        if mode == Mode.CONTEXT:
            is_whole = len(destination) == elements
            return is_whole and unpacking.apply_context(data, destination, *self.bits, *_typical())
        if mode == Mode.UNCHANGED:
            return not len(body)
        if len(body) != elements * destination.itemsize:
            return False
        destination[:] = np.frombuffer(body, destination.dtype)[first:last]
        return True


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def warm_up(element_type: ElementType = ElementType.BF16, *, to_encode: bool = False) -> None:
    """Compile what decodes, or load it from the cache, before the first versions need it."""
    elements = SPLIT_ELEMENTS_MIN
    coder, held = KernelBlocks(element_type, elements), np.zeros(elements, element_type.storage)
    if to_encode:
        coder.encode(held, held + held.dtype.type(1))
        coder.encode_full(held)
        coder.encode_full(held[1:])
    for mode in Mode:  # none of these bodies is valid
        coder.apply(mode, bytes(8), held, elements, 0)
