"""What puts physical pages behind addresses: host memory here, a GPU's in `cuda`.

The serving process creates all pages of a pool at once and keeps them, so that memory promised to serving is never
lost to another process; a borrower adopts the same pages by descriptor. From then on a page changes hands by unmapping
it in one process and mapping it in the other. Which process may map a page is the ledger's matter, not decided here.

Host memory is an unlinked memory file (memfd) and not a file in /dev/shm: a container's limit for /dev/shm does not
apply to it, it is gone when the last process has ended, and it can be sealed against being cut short. A page is wiped
by writing zeros: giving its memory to the system and taking new costs ten times as much, and another process may
get it in between.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Protocol

from rose.device.kv_pool import host_memory
from rose.device.kv_pool.host_memory import PAGE_BYTES
from rose.errors import ConfigError


class PageBackend(Protocol):
    """Pages of one pool, as one process reaches them. Every call raises Unavailable if the device refuses."""

    @property
    def kind(self) -> str: ...
    @property
    def pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def device_id(self) -> bytes:
        """Up to 16 bytes that name the memory's device: a borrower of another device must be refused."""

    @property
    def descriptors(self) -> int:
        """How many descriptors hand over the whole pool."""

    def export(self, number: int) -> int:
        """Return a new descriptor, which the caller closes."""

    def reserve(self, pages: int) -> int:
        """Return the first of so many pages of addresses, with nothing behind them."""

    def free(self, address: int, pages: int) -> None:
        """Give addresses back that were reserved in one piece; nothing may be mapped there."""

    def map(self, address: int, page: int, count: int = 1) -> None:
        """Put this page, and those that follow it, behind the addresses from here on.

        After an error some of them may be mapped: the caller unmaps each.
        """

    def unmap(self, address: int) -> None:
        """Take one page away, if there is one. Touching its addresses is an error from now on."""

    def wipe(self, address: int, count: int = 1) -> None:
        """Begin to fill mapped pages with zeros."""

    def wait_wiped(self) -> None:
        """Return when all that was begun is wiped."""

    def settle(self) -> None:
        """Return when the device has finished everything that this process gave it to do."""

    def close(self) -> None:
        """Let go of the pages. Twice is harmless."""


class MemfdBackend:
    """Pages of host memory: parts of one memory file."""

    kind = "memfd"
    device_id = b"host"
    descriptors = 1

    def __init__(self, descriptor: int, pages: int, page_bytes: int) -> None:
        """Take over this memory file."""
        self._descriptor = descriptor
        self.pages = pages
        self.page_bytes = page_bytes

    @classmethod
    def create(cls, pages: int, page_bytes: int = PAGE_BYTES) -> MemfdBackend:
        """Make the pages, with memory behind all of them. Raises ConfigError or Unavailable before any is touched."""
        host_memory.check_sizes(pages, page_bytes)
        backend = cls(host_memory.sealed_file(pages * page_bytes), pages, page_bytes)
        try:
            if page_bytes % host_memory.HUGE_PAGE_BYTES == 0:
                host_memory.fill_file_huge(backend._descriptor, pages * page_bytes)
            host_memory.fill_file(backend._descriptor, 0, pages * page_bytes)
        except BaseException:
            backend.close()
            raise
        return backend

    @classmethod
    def adopt(cls, descriptors: Iterator[int], pages: int, page_bytes: int) -> MemfdBackend:
        """Use the pages of the process that exported these descriptors, which its caller closes. Raises ConfigError."""
        descriptor = os.dup(next(descriptors))
        size = os.fstat(descriptor).st_size
        if size != pages * page_bytes or not host_memory.is_sealed(descriptor):
            os.close(descriptor)
            raise ConfigError(
                f"the memory of the KV pool has {size} bytes, not {pages * page_bytes}, or can be cut short",
                hint="start the serving engine again",
            )
        return cls(descriptor, pages, page_bytes)

    def export(self, number: int) -> int:
        assert number == 0, "there is one descriptor"
        return os.dup(self._descriptor)

    def reserve(self, pages: int) -> int:
        return host_memory.reserve_addresses(pages, self.page_bytes)

    def free(self, address: int, pages: int) -> None:
        host_memory.release_addresses(address, pages * self.page_bytes)

    def map(self, address: int, page: int, count: int = 1) -> None:
        size = self.page_bytes
        host_memory.map_file(address, count * size, self._descriptor, page * size)

    def unmap(self, address: int) -> None:
        host_memory.unmap_file(address, self.page_bytes)

    def wipe(self, address: int, count: int = 1) -> None:
        ctypes.memset(address, 0, count * self.page_bytes)

    def wait_wiped(self) -> None:
        pass  # the call above returns when it is done

    def settle(self) -> None:
        pass  # a CPU does nothing by itself

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
