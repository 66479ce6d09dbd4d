"""The CUDA driver's calls for virtual memory, by ctypes: no compiler, no CUDA toolkit and no torch is needed.

`CudaDriver` is one device in one process. It uses the device's primary context, which is torch's own too, and wipes on
a stream of its own, so that waiting for a wipe never waits for the engine's kernels. Every call that fails raises
Unavailable with the driver's name for the error. ROSE_CUDA_DRIVER names another library than libcuda.so.1.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rose.errors import ConfigError, Unavailable

LIBRARY = "libcuda.so.1"
LIBRARY_VARIABLE = "ROSE_CUDA_DRIVER"

# From cuda.h.
PINNED, ON_DEVICE, POSIX_DESCRIPTOR, READ_WRITE = 1, 1, 1, 3
MINIMUM_GRANULARITY = 0
NON_BLOCKING_STREAM = 1  # does not wait for the default stream
REQUIRED_ATTRIBUTES = {102: "virtual memory management", 103: "sharing memory by file descriptors"}


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_meta_data", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_int, _size, _u64, _pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
_out = ctypes.POINTER
SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (_int, _out(ctypes.c_char_p)),
    "cuDeviceGet": (_out(_int), _int),
    "cuDeviceGetAttribute": (_out(_int), _int, _int),
    "cuDeviceGetUuid_v2": (ctypes.c_char * 16, _int),
    "cuDevicePrimaryCtxRetain": (_out(_pointer), _int),
    "cuDevicePrimaryCtxRelease_v2": (_int,),
    "cuCtxGetCurrent": (_out(_pointer),),
    "cuCtxSetCurrent": (_pointer,),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (_out(_pointer), ctypes.c_uint),
    "cuStreamDestroy_v2": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuMemGetAllocationGranularity": (_out(_size), _out(_AllocationProperties), _int),
    "cuMemCreate": (_out(_u64), _size, _out(_AllocationProperties), _u64),
    "cuMemRelease": (_u64,),
    "cuMemExportToShareableHandle": (_out(_int), _u64, _int, _u64),
    "cuMemImportFromShareableHandle": (_out(_u64), _pointer, _int),
    "cuMemAddressReserve": (_out(_u64), _size, _size, _u64, _u64),
    "cuMemAddressFree": (_u64, _size),
    "cuMemMap": (_u64, _size, _size, _u64, _u64),
    "cuMemUnmap": (_u64, _size),
    "cuMemSetAccess": (_u64, _size, _out(_Access), _size),
    "cuMemsetD8Async": (_u64, ctypes.c_ubyte, _size, _pointer),
}


class CudaDriver:
    """One device. Memory is named by handles, addresses are integers, sizes are bytes."""

    def __init__(self, device: int = 0) -> None:
        """Raise ConfigError where no pages can be shared, Unavailable where a call of the driver fails."""
        self._library = _load(os.environ.get(LIBRARY_VARIABLE, LIBRARY))
        self._call("cuInit", 0)
        number = _int()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self.device = number.value
        for attribute, what in REQUIRED_ATTRIBUTES.items():
            self._require(attribute, what)
        location = _Location(ON_DEVICE, self.device)
        self._properties = _AllocationProperties(PINNED, POSIX_DESCRIPTOR, location, None, _AllocationFlags())
        self._access = _Access(location, READ_WRITE)
        size = _size()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), self._properties, MINIMUM_GRANULARITY)
        self.granularity = size.value
        uuid = (ctypes.c_char * 16)()
        self._call("cuDeviceGetUuid_v2", uuid, self.device)
        self.uuid = bytes(uuid)
        with ExitStack() as undo:
            self._context = self._retain_context(undo)
            self._stream = self._create_stream(undo)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Release stream and context; memory is its owner's to release. Twice is harmless."""
        self._undo.close()

    # Memory

    def create(self, size: int) -> int:
        """Return the handle of new memory on the device. What it holds is not defined."""
        handle = _u64()
        self._call("cuMemCreate", ctypes.byref(handle), size, self._properties, 0)
        return handle.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export_memory(self, handle: int) -> int:
        """Return a new descriptor of this memory, which the caller closes."""
        descriptor = _int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, POSIX_DESCRIPTOR, 0)
        return descriptor.value

    def import_memory(self, descriptor: int) -> int:
        """Return a handle of another process's memory; the descriptor stays the caller's."""
        handle = _u64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), _pointer(descriptor), POSIX_DESCRIPTOR)
        return handle.value

    # Addresses

    def reserve(self, size: int, alignment: int) -> int:
        address = _u64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, alignment, 0, 0)
        return address.value

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        """Map memory, which nothing may touch before `allow`."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int) -> None:
        """Let this device read and write whole mappings."""
        self._call("cuMemSetAccess", address, size, self._access, 1)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    # Work

    def begin_zeroing(self, address: int, size: int) -> None:
        with self._current_context():
            self._call("cuMemsetD8Async", address, 0, size, self._stream)

    def wait_zeroed(self) -> None:
        with self._current_context():
            self._call("cuStreamSynchronize", self._stream)

    def settle(self) -> None:
        """Return when everything that this process gave the device to do is done."""
        with self._current_context():
            self._call("cuCtxSynchronize")

    @contextmanager
    def _current_context(self) -> Iterator[None]:
        """Make the primary context current in this thread; in an engine's own threads it is already."""
        before = _pointer()
        self._call("cuCtxGetCurrent", ctypes.byref(before))
        if before.value == self._context:
            yield
            return
        self._call("cuCtxSetCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxSetCurrent", before)

    def _retain_context(self, undo: ExitStack) -> int | None:
        context = _pointer()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        undo.callback(self._call, "cuDevicePrimaryCtxRelease_v2", self.device)
        return context.value

    def _create_stream(self, undo: ExitStack) -> int | None:
        stream = _pointer()
        with self._current_context():
            self._call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING_STREAM)
            undo.callback(self._call, "cuStreamDestroy_v2", stream.value)
        return stream.value

    def _require(self, attribute: int, what: str) -> None:
        value = _int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self.device)
        if not value.value:
            raise ConfigError(f"GPU {self.device} has no {what}", hint="run without a shared KV pool on this GPU")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            known = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(known))
            error = (known.value or b"unknown error").decode("ascii", "replace")
            raise Unavailable(
                f"the CUDA driver's {name.removesuffix('_v2')} failed: {error} ({code})",
                hint="look at `nvidia-smi` and the kernel's log, then restart this engine",
            )


def _load(path: str) -> ctypes.CDLL:
    """Return the driver's library with every call declared. Raises ConfigError."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ConfigError(
            f"no CUDA driver: {error}", hint="install NVIDIA's driver, or use a KV pool of host memory"
        ) from error
    for name, arguments in SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise ConfigError(f"the CUDA driver has no {name}", hint="update NVIDIA's driver to 12 or newer") from error
        function.argtypes, function.restype = arguments, _int
    return library
