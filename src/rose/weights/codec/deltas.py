"""Whole arrays: encode against a base or in full, apply in place, describe.

Arrays hold raw bit patterns, so a not-a-number, an infinity, a negative zero or a denormal is a number like any other.
A change is the difference of two bit patterns, wrapped to the width of the type: the number of ULPs, away from zero if
positive. Since the arithmetic wraps, any pattern reaches any other.

Applying changes the destination as it goes. A caller that must not end with half an update applies to a copy, or checks
the payload's hash first: a payload as the encoder wrote it, on its own base, does not fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from rose.weights.codec.format import (
    BLOCK_ELEMENTS,
    BLOCK_ELEMENTS_MAX,
    ENTRY_BYTES,
    HEADER,
    MAGIC,
    SIZE_BITS,
    VERSION,
    Body,
    CodecError,
    Elements,
    ElementType,
    Kind,
    Mode,
    block_count,
    parse,
)

if TYPE_CHECKING:
    from rose.weights.codec.codec_kernels import KernelBlocks

Payload = bytes | bytearray | memoryview
Result = TypeVar("Result")

_READ_AS = {
    "float16": ElementType.FP16,
    "float32": ElementType.FP32,
    "uint16": ElementType.BF16,
    "uint32": ElementType.FP32,
}


@dataclass(frozen=True, slots=True)
class Description:
    """The facts that a payload states about itself."""

    kind: Kind
    element_type: ElementType
    elements: int
    block_elements: int
    payload_bytes: int
    full_bytes: int
    blocks_by_mode: dict[Mode, int]


def encode(
    base: NDArray[Any], new: NDArray[Any], *, element_type: ElementType | None = None,
    block_elements: int = BLOCK_ELEMENTS, contexts: bool = False, threads: int = 1,
) -> bytes:  # fmt: skip
    """Return what turns `base` into `new`, never larger than `new` but for the header and 4 bytes a block.

    With `contexts` it is about a quarter smaller, slower on both sides, and its blocks can only be applied whole.
    bf16 comes as uint16, the default reading of it; say FP16 for half floats given as uint16.
    """
    kind = element_type or _element_type(new)
    old_bits, new_bits = _bits(base, kind), _bits(new, kind)
    if base.shape != new.shape:
        raise CodecError(f"the base has shape {base.shape}, the new weights {new.shape}")

    def encode_block(coder: KernelBlocks, span: slice) -> tuple[Mode, Body]:
        return coder.encode(old_bits[span], new_bits[span])

    return _encode(Kind.DELTA, kind, new_bits.size, block_elements, threads, contexts, encode_block)


def encode_full(
    new: NDArray[Any], *, element_type: ElementType | None = None, block_elements: int = BLOCK_ELEMENTS,
    threads: int = 1,
) -> bytes:  # fmt: skip
    """Return `new` for receivers without a base. Exponents are coded, which makes bf16 about a third smaller."""
    kind = element_type or _element_type(new)
    new_bits = _bits(new, kind)

    def encode_block(coder: KernelBlocks, span: slice) -> tuple[Mode, Body]:
        return coder.encode_full(new_bits[span])

    return _encode(Kind.FULL, kind, new_bits.size, block_elements, threads, False, encode_block)


def apply(
    payload: Payload, destination: NDArray[Any], *, start: int = 0, stop: int | None = None, threads: int = 1
) -> None:
    """Decode elements `start` to `stop` into `destination`, which holds these elements of the base.

    For a full payload it may hold anything. Raises CodecError for bytes that are no payload or do not fit.
    """
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
    data, make = memoryview(payload), _kernels()

    def apply_run(run: Sequence[int]) -> None:
        coder = make(kind, 0, False)
        for number in run:
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

    _in_threads(apply_run, range(start // layout.block_elements, block_count(stop, layout.block_elements)), threads)


def describe(payload: Payload) -> Description:
    """Return what a payload says about itself. Raises CodecError."""
    layout = parse(payload)
    modes = Counter(Mode(mode) for mode in layout.modes.tolist())
    full_bytes = layout.elements * layout.element_type.storage.itemsize
    return Description(
        layout.kind, layout.element_type, layout.elements, layout.block_elements, len(payload), full_bytes, dict(modes)
    )


def _encode(
    kind: Kind, element_type: ElementType, elements: int, block_elements: int, threads: int, contexts: bool,
    encode_block: Callable[[KernelBlocks, slice], tuple[Mode, Body]],
) -> bytes:  # fmt: skip
    if not 1 <= block_elements <= BLOCK_ELEMENTS_MAX:
        raise CodecError(f"blocks of {block_elements} elements: 1 to {BLOCK_ELEMENTS_MAX} are possible")
    make = _kernels()

    def encode_run(run: Sequence[int]) -> list[tuple[Mode, Body]]:
        coder = make(element_type, min(block_elements, elements), contexts)
        return [encode_block(coder, slice(i * block_elements, (i + 1) * block_elements)) for i in run]

    runs = _in_threads(encode_run, range(block_count(elements, block_elements)), threads)
    coded = [block for run in runs for block in run]
    header = HEADER.pack(MAGIC, VERSION, kind, element_type, 0, elements, block_elements)
    entries = [int(mode << SIZE_BITS | len(body)).to_bytes(ENTRY_BYTES, "little") for mode, body in coded]
    return b"".join([header, *entries, *(body for _, body in coded)])


def _in_threads(call: Callable[[Sequence[int]], Result], numbers: range, threads: int) -> list[Result]:
    """Call on contiguous parts of the numbers, one part a thread; raise the first error when all have ended."""
    size = -(-len(numbers) // max(1, threads)) or 1
    runs = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    if len(runs) <= 1:
        return [call(run) for run in runs]
    with ThreadPoolExecutor(len(runs), thread_name_prefix="rose-codec") as pool:
        return list(pool.map(call, runs))


def _kernels() -> type[KernelBlocks]:
    """Import the compiled coder late: numba takes half a second."""
    from rose.weights.codec.codec_kernels import KernelBlocks

    return KernelBlocks


def _element_type(array: NDArray[Any]) -> ElementType:
    if array.dtype.name not in _READ_AS:
        raise CodecError(f"weights of type {array.dtype}", hint="the codec takes bf16 (as uint16), fp16 and fp32")
    return _READ_AS[array.dtype.name]


def _bits(array: NDArray[Any], element_type: ElementType) -> Elements:
    """Return the array's own memory as one row of bit patterns."""
    if _element_type(array).storage != element_type.storage:
        raise CodecError(f"an array of {array.dtype} for weights of type {element_type.name.lower()}")
    if not array.flags.c_contiguous:
        raise CodecError("weights that do not lie in one piece", hint="pass numpy.ascontiguousarray(weights)")
    flat: Elements = array.reshape(-1).view(element_type.storage)
    return flat
