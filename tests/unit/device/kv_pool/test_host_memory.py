"""System calls for pages of host memory, against the kernel's own tables."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest

from rose.device.kv_pool import host_memory
from rose.errors import ConfigError

PAGE = 64 << 10


def test_reserved_addresses_are_aligned_and_have_no_memory() -> None:
    address = host_memory.reserve_addresses(3, PAGE)
    assert address % PAGE == 0
    line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if f"{address:x}-" in line)
    assert f"{address:x}-{address + 3 * PAGE:x} ---p" in line
    host_memory.release_addresses(address, 3 * PAGE)
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_a_forked_child_does_not_inherit_the_pages() -> None:
    descriptor = host_memory.sealed_file(PAGE)
    host_memory.fill_file(descriptor, 0, PAGE)
    address = host_memory.reserve_addresses(1, PAGE)
    host_memory.map_file(address, PAGE, descriptor, 0)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(address, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
    assert ctypes.string_at(address, 1) == b"\0"
    host_memory.release_addresses(address, PAGE)
    os.close(descriptor)


def test_emptied_memory_goes_back_to_the_system_and_reads_as_zero() -> None:
    descriptor = host_memory.sealed_file(2 * PAGE)
    host_memory.fill_file(descriptor, 0, 2 * PAGE)
    os.pwrite(descriptor, b"x" * 2 * PAGE, 0)
    host_memory.empty_file(descriptor, PAGE, PAGE)
    assert os.fstat(descriptor).st_blocks * 512 == PAGE
    assert os.pread(descriptor, 2 * PAGE, 0) == b"x" * PAGE + bytes(PAGE)
    with pytest.raises(OSError):
        host_memory.empty_file(descriptor, 0, 0)
    assert host_memory.is_sealed(descriptor) and not host_memory.is_sealed(0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, PAGE)
    os.close(descriptor)


def test_a_container_s_limit_counts_and_its_cached_files_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CONTROL_GROUP", tmp_path)
    machine = host_memory.available_bytes()
    (tmp_path / "memory.current").write_text("9000\n")
    (tmp_path / "memory.stat").write_text("anon 5000\ninactive_file 1500\nactive_file 500\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(host_memory.available_bytes() - machine) < machine / 2
    (tmp_path / "memory.max").write_text("10000\n")
    assert host_memory.available_bytes() == 3000


def test_neighbours_in_both_sequences_are_one_run() -> None:
    assert list(host_memory.runs([], [])) == []
    assert list(host_memory.runs([4, 5, 6, 9], [0, 1, 5, 6])) == [(4, 0, 2), (6, 5, 1), (9, 6, 1)]


@pytest.mark.parametrize("pages, page_bytes, message", [(0, PAGE, "at least one"), (4, 1000, "not possible")])
def test_impossible_sizes_are_refused(pages: int, page_bytes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        host_memory.check_sizes(pages, page_bytes)
