"""Whole arrays: encode against a base or in full, apply in place, describe.

Arrays hold raw bit patterns, so a not-a-number, an infinity, a negative zero or a denormal is a number like any other.
A change is the difference of two bit patterns, wrapped to the width of the type: the number of ULPs, away from zero if
positive. Only an element that crosses zero would be nearer in the order of floats, and it is thousands of ULPs away in
that order too, unless both are denormal. So no mapping is made, and since the arithmetic wraps, any pattern reaches any
other.

Applying changes the destination as it goes. Who may not be left with half an update applies to a copy, or checks the
payload's hash first: a payload as the encoder wrote it, on the base it was encoded against, does not fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray

from rose.weights.codec.format import (
    BLOCK_ELEMENTS,
    BLOCK_ELEMENTS_MAX,
    Blocks,
    Body,
    CodecError,
    Elements,
    ElementType,
    Kind,
    Layout,
    Mode,
    block_count,
    pack_entry,
    pack_header,
    parse,
)

MakeBlocks = Callable[[ElementType, int, bool], Blocks]
Result = TypeVar("Result")

_READ_AS = {"float16": ElementType.FP16, "float32": ElementType.FP32, "uint16": ElementType.BF16,
            "uint32": ElementType.FP32}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Description:
    """What a payload says about itself."""

    kind: Kind
    element_type: ElementType
    elements: int
    block_elements: int
    payload_bytes: int
    full_bytes: int
    blocks_by_mode: dict[Mode, int]


def encode(
    base: NDArray[Any], new: NDArray[Any], *, element_type: ElementType | None = None,
    block_elements: int = BLOCK_ELEMENTS, contexts: bool = False, threads: int = 1, blocks: MakeBlocks | None = None,
) -> bytes:  # fmt: skip
    """What turns `base` into `new`. Never larger than `new` but for the header and 4 bytes a block.

    With `contexts` it is about a quarter smaller, slower on both sides, and its blocks can only be applied whole.
    bf16 comes as uint16, the default reading of it; say FP16 for half floats given as uint16.
    """
    kind = element_type or _element_type(new)
    old_bits, new_bits = _bits(base, kind), _bits(new, kind)
    if base.shape != new.shape:
        raise CodecError(f"the base has shape {base.shape}, the new weights {new.shape}")

    def one(coder: Blocks, span: slice) -> tuple[Mode, Body]:
        return coder.encode(old_bits[span], new_bits[span])

    return _encode(Kind.DELTA, kind, new_bits.size, block_elements, threads, blocks, one, contexts)


def encode_full(
    new: NDArray[Any], *, element_type: ElementType | None = None, block_elements: int = BLOCK_ELEMENTS,
    threads: int = 1, blocks: MakeBlocks | None = None,
) -> bytes:  # fmt: skip
    """`new` itself, for who has no base. Exponents are coded, which makes bf16 weights about a third smaller."""
    kind = element_type or _element_type(new)
    new_bits = _bits(new, kind)

    def one(coder: Blocks, span: slice) -> tuple[Mode, Body]:
        return coder.encode_full(new_bits[span])

    return _encode(Kind.FULL, kind, new_bits.size, block_elements, threads, blocks, one)


def apply(
    payload: bytes | bytearray | memoryview, destination: NDArray[Any], *, start: int = 0, stop: int | None = None,
    threads: int = 1, blocks: MakeBlocks | None = None,
) -> None:  # fmt: skip
    """Decode elements `start` to `stop` into `destination`, which holds these elements of the base (or, for a full
    payload, anything). Raises CodecError for bytes that are no payload or do not fit."""
    layout = parse(payload)
    kind, stop = layout.element_type, layout.elements if stop is None else stop
    if not 0 <= start <= stop <= layout.elements:
        raise CodecError(f"elements {start} to {stop} of a payload with {layout.elements}")
    if not destination.flags.writeable:
        raise CodecError("the destination of a weight payload cannot be written")
    bits = _bits(destination, kind)
    if bits.size != stop - start:
        raise CodecError(f"a destination of {bits.size} elements for elements {start} to {stop}")
    if start == stop:
        return
    numbers = range(start // layout.block_elements, block_count(stop, layout.block_elements))
    data = memoryview(payload)
    make = blocks or _kernels()

    def some(run: Sequence[int]) -> None:
        coder = make(kind, 0, False)
        for number in run:
            _apply_block(coder, layout, number, data, bits, start, stop)

    _in_threads(some, numbers, threads)


def describe(payload: bytes | bytearray | memoryview) -> Description:
    layout = parse(payload)
    modes = Counter(Mode(mode) for mode in layout.modes.tolist())
    full_bytes = layout.elements * layout.element_type.storage.itemsize
    return Description(layout.kind, layout.element_type, layout.elements, layout.block_elements, len(payload),
                       full_bytes, dict(modes))  # fmt: skip


def _apply_block(
    coder: Blocks, layout: Layout, number: int, data: memoryview, bits: Elements, start: int, stop: int
) -> None:
    first, after = layout.span(number)
    low, high = max(first, start), min(after, stop)
    body = data[layout.offsets[number] : layout.offsets[number + 1]]
    mode = Mode(int(layout.modes[number]))
    if mode == Mode.CONTEXT and (low, high) != (first, after):
        raise CodecError(
            f"elements {start} to {stop} cut block {number} of a weight payload, which was coded by context",
            hint="take whole blocks, or encode with contexts=False",
        )
    if not coder.apply(mode, body, bits[low - start : high - start], after - first, low - first):
        raise CodecError(
            f"block {number} of a weight payload is damaged ({mode.name.lower()}, {len(body)} bytes)",
            hint="fetch it again; the destination may be half written",
        )


def _encode(
    kind: Kind, element_type: ElementType, elements: int, block_elements: int, threads: int,
    blocks: MakeBlocks | None, one: Callable[[Blocks, slice], tuple[Mode, Body]], contexts: bool = False,
) -> bytes:  # fmt: skip
    if not 1 <= block_elements <= BLOCK_ELEMENTS_MAX:
        raise CodecError(f"blocks of {block_elements} elements: 1 to {BLOCK_ELEMENTS_MAX} are possible")
    make = blocks or _kernels()

    def some(run: Sequence[int]) -> list[tuple[Mode, Body]]:
        coder = make(element_type, min(block_elements, elements), contexts)
        return [one(coder, slice(i * block_elements, (i + 1) * block_elements)) for i in run]

    runs = _in_threads(some, range(block_count(elements, block_elements)), threads)
    found = [block for run in runs for block in run]
    entries = [pack_entry(mode, len(body)) for mode, body in found]
    header = pack_header(kind, element_type, elements, block_elements)
    return b"".join([header, *entries, *(body for _, body in found)])


def _in_threads(some: Callable[[Sequence[int]], Result], numbers: range, threads: int) -> list[Result]:
    """`some` on contiguous parts of the numbers, one part a thread; the first error is raised when all have ended."""
    size = -(-len(numbers) // max(1, threads)) or 1
    runs = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    if len(runs) <= 1:
        return [some(run) for run in runs]
    with ThreadPoolExecutor(len(runs), thread_name_prefix="rose-codec") as pool:
        return list(pool.map(some, runs))


def _kernels() -> MakeBlocks:
    """Imported late: numba takes half a second."""
    from rose.weights.codec.kernels import KernelBlocks

    return KernelBlocks


def _element_type(array: NDArray[Any]) -> ElementType:
    if array.dtype.name not in _READ_AS:
        raise CodecError(f"weights of type {array.dtype}", hint="the codec takes bf16 (as uint16), fp16 and fp32")
    return _READ_AS[array.dtype.name]


def _bits(array: NDArray[Any], element_type: ElementType) -> Elements:
    """The array's own memory as one row of bit patterns."""
    read_as = _element_type(array)
    if read_as.storage != element_type.storage:
        raise CodecError(f"an array of {array.dtype} for weights of type {element_type.name.lower()}")
    if not array.flags.c_contiguous:
        raise CodecError("weights that do not lie in one piece", hint="pass numpy.ascontiguousarray(weights)")
    flat: Elements = array.reshape(-1).view(element_type.storage)
    return flat
