"""The codec that the chain uses, behind the seam for others.

The chain never looks into a payload. It gives a codec the numbers of one chunk as bit patterns (bf16 and fp16 as
uint16, fp32 as uint32) and later hands the payload to a codec of the same name.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rose.errors import RequestRefused
from rose.weights import codec as sparse

Bits = NDArray[Any]
Payload = bytes | bytearray | memoryview

BITS: dict[str, type[np.unsignedinteger[Any]]] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
_ELEMENT_TYPES = {
    "BF16": sparse.ElementType.BF16,
    "F16": sparse.ElementType.FP16,
    "F32": sparse.ElementType.FP32,
}


class Codec(Protocol):
    """An encoder and decoder of one chunk."""

    name: str

    def encode(self, base: Bits, new: Bits, dtype: str) -> bytes:
        """Return what turns `base` into `new`."""

    def encode_full(self, new: Bits, dtype: str) -> bytes:
        """Return `new` itself."""

    def apply(self, payload: Payload, destination: Bits) -> None:
        """Turn the destination, which holds the base (or anything, for a full payload), into the new numbers."""


class SparseCodec:
    """The project's codec: gaps and steps against the base. See docs/weights-format.md."""

    name = "sparse-1"

    def __init__(self, *, threads: int = 1) -> None:
        self._threads = threads

    def encode(self, base: Bits, new: Bits, dtype: str) -> bytes:
        return sparse.encode(base, new, element_type=_ELEMENT_TYPES[dtype], threads=self._threads)

    def encode_full(self, new: Bits, dtype: str) -> bytes:
        return sparse.encode_full(new, element_type=_ELEMENT_TYPES[dtype], threads=self._threads)

    def apply(self, payload: Payload, destination: Bits) -> None:
        sparse.apply(payload, destination, threads=self._threads)


def check_same(codec: Codec, name: str) -> None:
    """Raise RequestRefused unless weights were encoded with the codec that this side has."""
    if codec.name != name:
        raise RequestRefused(
            f"these weights were encoded with `{name}`, and this side reads `{codec.name}`",
            hint="run the same version of ROSE on both sides",
        )
