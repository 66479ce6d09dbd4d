"""The competitors as codecs of the chain, so that everything but the bytes is the same for all."""

from __future__ import annotations

from typing import Any

import numpy as np
from deltas.baselines import Coo
from numpy.typing import NDArray

from rose.errors import RequestRefused
from rose.weights.coding import Codec, SparseCodec
from rose.weights.publish import CHUNK_ELEMENTS_MAX


class PlainCodec:
    """Every number as it is, changed or not: the baseline of the others."""

    name = "plain-1"

    def encode(self, base: NDArray[Any], new: NDArray[Any], dtype: str) -> bytes:
        return self.encode_full(new, dtype)

    def encode_full(self, new: NDArray[Any], dtype: str) -> bytes:
        return new.astype(new.dtype.newbyteorder("<"), copy=False).tobytes()

    def apply(self, payload: Any, destination: NDArray[Any]) -> None:
        little = destination.dtype.newbyteorder("<")
        if len(payload) != destination.nbytes:
            raise RequestRefused(f"a plain payload of {len(payload)} bytes for {destination.nbytes} bytes of weights")
        destination.reshape(-1)[:] = np.frombuffer(payload, dtype=little)


class CooCodec(PlainCodec):
    """Changed positions as int32 and their values as bf16: what the paper sends."""

    name = "coo-1"

    def __init__(self) -> None:
        self._coo: Coo | None = None

    def encode(self, base: NDArray[Any], new: NDArray[Any], dtype: str) -> bytes:
        return b"d" + self._scratch().encode(base.reshape(-1), new.reshape(-1))

    def encode_full(self, new: NDArray[Any], dtype: str) -> bytes:
        return b"f" + super().encode_full(new, dtype)

    def apply(self, payload: Any, destination: NDArray[Any]) -> None:
        body = memoryview(payload)[1:]
        if payload[0] == ord("f"):
            super().apply(body, destination)
        else:
            positions, values = self._split(bytes(body))
            destination.reshape(-1)[positions] = values

    def _split(self, body: bytes) -> list[NDArray[Any]]:
        return self._scratch(0).streams.split(body, np.int32, np.uint16)

    def _scratch(self, elements: int = CHUNK_ELEMENTS_MAX) -> Coo:
        if self._coo is None:
            self._coo = Coo(elements, None)
        return self._coo


def codec_of(method: str) -> Codec:
    return {"ours": SparseCodec, "coo": CooCodec, "full": PlainCodec}[method]()
