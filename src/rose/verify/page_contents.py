"""What pages of a pool hold: a borrower writes a pattern, and the next owner looks whether anything of it is left.

An engine never needs these calls, so they are here and not in the pool's back ends.
"""

from __future__ import annotations

import ctypes
import os

from rose.device.kv_pool.cuda_driver import LIBRARY, LIBRARY_VARIABLE, NON_BLOCKING_STREAM
from rose.errors import Unavailable

PATTERN = 0xA5
_pointer, _address, _size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t


class PageContents:
    """Reads and writes mapped pages of one back end; of a GPU through the driver, in this thread."""

    def __init__(self, kind: str, device: int) -> None:
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_int()
        if kind != "cuda":
            return
        self._library = ctypes.CDLL(os.environ.get(LIBRARY_VARIABLE, LIBRARY))
        context, self._stream = _pointer(), _pointer()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(NON_BLOCKING_STREAM))

    def fill(self, address: int, size: int) -> None:
        """Write the pattern."""
        if self._library is None:
            ctypes.memset(address, PATTERN, size)
            return
        pattern = ctypes.c_ubyte(PATTERN)
        self._call("cuMemsetD8Async", _address(address), pattern, _size(size), self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def is_zero(self, address: int, size: int) -> bool:
        """Return whether every byte is zero."""
        return not self._read(address, size).strip(b"\0")

    def close(self) -> None:
        """Let go of the GPU, whose context would keep memory of it."""
        if self._library is not None:
            self._call("cuStreamDestroy_v2", self._stream)
            self._call("cuCtxSetCurrent", _pointer())
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _read(self, address: int, size: int) -> bytes:
        if self._library is None or not hasattr(self._library, "cuMemcpyDtoH_v2"):  # a stand-in has host memory
            return ctypes.string_at(address, size)
        content = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", content, _address(address), _size(size))
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise Unavailable(f"the CUDA driver's {name.removesuffix('_v2')} failed with error {code}")
