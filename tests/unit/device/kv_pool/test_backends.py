"""Pages of host memory: how they are made, adopted and refused."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from rose.device.kv_pool import host_memory
from rose.device.kv_pool.backends import MemfdBackend
from rose.errors import ConfigError, Unavailable

PAGES, PAGE_BYTES = 4, 64 << 10


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_all_memory_of_a_pool_is_there_from_the_start_and_stays() -> None:
    backend = MemfdBackend.create(PAGES, PAGE_BYTES)
    descriptor = backend.export(0)
    address = backend.reserve(PAGES)

    def resident_bytes() -> int:
        return os.fstat(descriptor).st_blocks * 512

    assert resident_bytes() == PAGES * PAGE_BYTES
    backend.map(address, 0, PAGES)
    backend.wipe(address, PAGES)
    for place in range(PAGES):
        backend.unmap(address + place * PAGE_BYTES)
    assert resident_bytes() == PAGES * PAGE_BYTES, "a wipe gives no memory to the system"
    backend.free(address, PAGES)
    os.close(descriptor)
    backend.close()
    backend.close()


@pytest.mark.parametrize("huge_fill_s_max", [0.0, 10.0])
def test_large_pages_have_all_their_memory_with_and_without_huge_pages(
    monkeypatch: pytest.MonkeyPatch, huge_fill_s_max: float
) -> None:
    monkeypatch.setattr(host_memory, "HUGE_FILL_S_MAX", huge_fill_s_max)
    backend = MemfdBackend.create(PAGES, host_memory.HUGE_PAGE_BYTES)
    descriptor = backend.export(0)
    address = backend.reserve(1)
    backend.map(address, PAGES - 1)
    assert os.fstat(descriptor).st_blocks * 512 == PAGES * host_memory.HUGE_PAGE_BYTES
    assert not any(ctypes.string_at(address, host_memory.HUGE_PAGE_BYTES))
    backend.free(address, 1)
    os.close(descriptor)
    backend.close()


def test_a_pool_larger_than_the_machine_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: PAGES * PAGE_BYTES - 1)
    before = open_files()
    with pytest.raises(ConfigError, match="does not fit: this machine has 0 MiB free"):
        MemfdBackend.create(PAGES, PAGE_BYTES)
    assert open_files() == before


def test_memory_that_the_system_refuses_is_said_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(12, os.strerror(12))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_files()
    with pytest.raises(Unavailable, match="no memory for"):
        MemfdBackend.create(PAGES, PAGE_BYTES)
    assert open_files() == before


def test_memory_of_another_size_or_that_can_be_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(PAGES * PAGE_BYTES))
    larger = host_memory.sealed_file((PAGES + 1) * PAGE_BYTES)
    unsealed = os.open(file, os.O_RDWR)
    before = open_files()
    for descriptor in (larger, unsealed):
        with pytest.raises(ConfigError, match="the memory of the KV pool"):
            MemfdBackend.adopt(iter([descriptor]), PAGES, PAGE_BYTES)
    assert open_files() == before
    os.close(larger)
    os.close(unsealed)
