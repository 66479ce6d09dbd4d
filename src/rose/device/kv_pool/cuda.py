"""Pages of a GPU: every page is one allocation of the driver, shared between processes by descriptor.

The serving process creates all pages at once; creating one costs several times as much as mapping it, and nothing else
on the GPU can then take the memory away. A borrower imports every page once. Imported memory lives until the last
process has let go, so a borrower must end when serving has.

Verified against a stand-in for the driver, not on a GPU: docs/vllm.md has the list of what that leaves open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice

from rose.device.kv_pool.cuda_driver import CudaDriver
from rose.device.kv_pool.host_memory import PAGE_BYTES
from rose.errors import ConfigError, Unavailable


class CudaBackend:
    """Pages of one GPU, each with a handle in this process."""

    kind = "cuda"

    def __init__(self, driver: CudaDriver, handles: list[int], page_bytes: int, undo: ExitStack) -> None:
        """Use these pages; `undo` releases them and the driver."""
        self._driver = driver
        self._handles = handles
        self._undo = undo
        self._mapped: set[int] = set()  # addresses of pages: the driver refuses to unmap what is not mapped
        self.pages = len(handles)
        self.page_bytes = page_bytes
        self.device_id = driver.uuid
        self.descriptors = len(handles)

    @classmethod
    def create(cls, pages: int, page_bytes: int = PAGE_BYTES, device: int = 0) -> CudaBackend:
        """Make the pages. Raises ConfigError or Unavailable, with nothing left behind."""
        with ExitStack() as undo:
            driver = _driver(device, page_bytes, undo)
            handles: list[int] = []
            try:
                for _ in range(pages):
                    handles.append(_kept(driver, driver.create(page_bytes), undo))
            except Unavailable as error:
                raise Unavailable(
                    f"GPU {device} has room for {len(handles)} of {pages} KV pages of {page_bytes} bytes: {error.what}",
                    hint="lower the KV memory of the pool, or stop what else uses this GPU",
                ) from error
            return cls(driver, handles, page_bytes, undo.pop_all())

    @classmethod
    def adopt(
        cls, descriptors: Iterator[int], pages: int, page_bytes: int, device: int = 0, device_id: bytes = b""
    ) -> CudaBackend:
        """Use the pages of the process that exported these descriptors, which its caller closes.

        Raises ConfigError if that process uses another GPU than this, and Unavailable; nothing is left behind.
        """
        with ExitStack() as undo:
            driver = _driver(device, page_bytes, undo)
            if device_id not in (b"", driver.uuid):
                raise ConfigError(
                    f"the KV pool is on another GPU than this process's GPU {device}",
                    hint="give both engines the same CUDA_VISIBLE_DEVICES",
                )
            handles = [
                _kept(driver, driver.import_memory(descriptor), undo) for descriptor in islice(descriptors, pages)
            ]
            return cls(driver, handles, page_bytes, undo.pop_all())

    def export(self, number: int) -> int:
        descriptor = self._driver.export_memory(self._handles[number])
        os.set_inheritable(descriptor, False)
        return descriptor

    def reserve(self, pages: int) -> int:
        return self._driver.reserve(pages * self.page_bytes, self.page_bytes)

    def free(self, address: int, pages: int) -> None:
        self._driver.free(address, pages * self.page_bytes)

    def map(self, address: int, page: int, count: int = 1) -> None:
        for place in range(count):
            at = address + place * self.page_bytes
            self._driver.map(at, self.page_bytes, self._handles[page + place])
            self._mapped.add(at)
        self._driver.allow(address, count * self.page_bytes)

    def unmap(self, address: int) -> None:
        if address in self._mapped:
            self._driver.unmap(address, self.page_bytes)
            self._mapped.remove(address)

    def wipe(self, address: int, count: int = 1) -> None:
        self._driver.begin_zeroing(address, count * self.page_bytes)

    def wait_wiped(self) -> None:
        self._driver.wait_zeroed()

    def settle(self) -> None:
        self._driver.settle()

    def close(self) -> None:
        self._undo.close()


def _driver(device: int, page_bytes: int, undo: ExitStack) -> CudaDriver:
    driver = CudaDriver(device)
    undo.callback(driver.close)
    if page_bytes % driver.granularity:
        raise ConfigError(
            f"GPU {device} has pages of {driver.granularity} bytes, so KV pages of {page_bytes} are not possible",
            hint=f"take a multiple of {driver.granularity}",
        )
    return driver


def _kept(driver: CudaDriver, handle: int, undo: ExitStack) -> int:
    """Return the handle, which is released when `undo` is closed."""
    undo.callback(driver.release, handle)
    return handle
