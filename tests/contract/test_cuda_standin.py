"""The stand-in for the CUDA driver is as strict as the driver: what it lets pass, tests on it prove nothing about."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.cuda_standin.build import StandIn

from rose.device.kv_pool.cuda_driver import SIGNATURES, CudaDriver
from rose.errors import RoseError, Unavailable

PAGE = 2 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def driver(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    monkeypatch.setenv("ROSE_CUDA_DRIVER", str(standin.path))
    made = CudaDriver()
    yield made
    made.close()
    assert not any(standin.counts().values()), standin.counts()


@pytest.fixture
def address(driver: CudaDriver) -> Iterator[int]:
    """Return four pages of reserved addresses."""
    made = driver.reserve(4 * PAGE, PAGE)
    yield made
    driver.free(made, 4 * PAGE)


@pytest.fixture
def memory(driver: CudaDriver) -> Iterator[int]:
    """Return the handle of one page."""
    made = driver.create(PAGE)
    yield made
    driver.release(made)


def error_of(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(Unavailable) as refusal:
        call(*arguments)
    return refusal.value.what.split(": ")[1]


def byte(address: int) -> int:
    return ctypes.string_at(address, 1)[0]


def signal_of(standin: StandIn, code: str) -> int:
    """Run this code in a process of its own with two mapped pages at `at`; return the signal that ended it."""
    script = f"""
import ctypes
from rose.device.kv_pool.cuda_driver import CudaDriver
PAGE = {PAGE}
driver = CudaDriver()
at = driver.reserve(4 * PAGE, PAGE)
one, two = driver.create(PAGE), driver.create(PAGE)
driver.map(at, PAGE, one)
driver.map(at + PAGE, PAGE, two)
driver.allow(at, PAGE)
{code}
"""
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "ROSE_CUDA_DRIVER": str(standin.path)}
    return -subprocess.run([sys.executable, "-c", script], env=variables, timeout=60, check=False).returncode


def test_nothing_works_before_the_driver_is_initialised(standin: StandIn) -> None:
    code = f"""
import ctypes
library = ctypes.CDLL({str(standin.path)!r})
raise SystemExit(library.cuMemRelease(ctypes.c_uint64(1)))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


def test_work_needs_a_current_context_and_the_thread_is_left_as_it_was(standin: StandIn, driver: CudaDriver) -> None:
    current = ctypes.c_void_p(1)
    assert standin.library.cuCtxSynchronize() == 201
    driver.settle()
    standin.library.cuCtxGetCurrent(ctypes.byref(current))
    assert current.value is None


def test_sizes_and_addresses_are_whole_granules(driver: CudaDriver, address: int, memory: int) -> None:
    assert driver.granularity == PAGE and address % PAGE == 0
    assert error_of(driver.create, PAGE + 1) == "CUDA_ERROR_INVALID_VALUE (1)"
    assert error_of(driver.reserve, PAGE // 2, PAGE) == "CUDA_ERROR_INVALID_VALUE (1)"
    for at, size in ((address + 1, PAGE), (address, PAGE // 2), (address, 2 * PAGE), (address + 4 * PAGE, PAGE)):
        assert error_of(driver.map, at, size, memory) == "CUDA_ERROR_INVALID_VALUE (1)"


def test_a_place_is_mapped_once_and_unmapped_whole(driver: CudaDriver, address: int, memory: int) -> None:
    driver.map(address, PAGE, memory)
    assert error_of(driver.map, address, PAGE, memory) == "CUDA_ERROR_INVALID_VALUE (1)"
    assert error_of(driver.unmap, address, PAGE // 2) == "CUDA_ERROR_INVALID_VALUE (1)"
    assert error_of(driver.unmap, address + PAGE, PAGE) == "CUDA_ERROR_INVALID_VALUE (1)"
    assert error_of(driver.allow, address, 2 * PAGE) == "CUDA_ERROR_INVALID_VALUE (1)"
    assert error_of(driver.free, address, 4 * PAGE) == "CUDA_ERROR_INVALID_VALUE (1)"
    driver.unmap(address, PAGE)
    assert error_of(driver.free, address, PAGE) == "CUDA_ERROR_INVALID_VALUE (1)"


def test_memory_is_shared_between_mappings_and_lives_as_long_as_one(driver: CudaDriver, address: int) -> None:
    memory = driver.create(PAGE)
    descriptor = driver.export_memory(memory)
    again = driver.import_memory(descriptor)
    os.close(descriptor)
    driver.map(address, PAGE, memory)
    driver.map(address + PAGE, PAGE, again)
    driver.allow(address, 2 * PAGE)
    assert byte(address) == 0xA5, "what new memory holds is not defined"
    ctypes.memset(address, 7, PAGE)
    driver.release(memory)
    driver.unmap(address, PAGE)
    assert byte(address + PAGE) == 7
    driver.release(again)
    assert error_of(driver.release, again) == "CUDA_ERROR_INVALID_VALUE (1)"
    assert byte(address + PAGE) == 7
    driver.unmap(address + PAGE, PAGE)


def test_work_on_a_stream_is_done_when_it_is_waited_for(driver: CudaDriver, address: int, memory: int) -> None:
    driver.map(address, PAGE, memory)
    driver.allow(address, PAGE)
    for wait in (driver.wait_zeroed, driver.settle):
        ctypes.memset(address, 7, PAGE)
        driver.begin_zeroing(address, PAGE)
        assert byte(address) == 7
        wait()
        assert byte(address) == 0
    driver.unmap(address, PAGE)


def test_memory_runs_out(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_BYTES", str(2 * PAGE))
    handles = [driver.create(PAGE), driver.create(PAGE)]
    assert error_of(driver.create, PAGE) == "CUDA_ERROR_OUT_OF_MEMORY (2)"
    driver.release(handles.pop())
    handles.append(driver.create(PAGE))
    for handle in handles:
        driver.release(handle)


def test_what_is_no_memory_is_not_imported(driver: CudaDriver, tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        assert error_of(driver.import_memory, file.fileno()) == "CUDA_ERROR_INVALID_VALUE (1)"
    assert error_of(driver.import_memory, 10_000) == "CUDA_ERROR_INVALID_VALUE (1)"


@pytest.mark.parametrize(
    "code, number",
    [
        ("ctypes.string_at(at, 1)", 0),
        ("ctypes.string_at(at + PAGE, 1)", 11),
        ("ctypes.string_at(at + 2 * PAGE, 1)", 11),
        ("driver.unmap(at, PAGE); ctypes.string_at(at, 1)", 11),
        ("driver.begin_zeroing(at, PAGE); driver.unmap(at, PAGE); driver.wait_zeroed()", 11),
    ],
    ids=["allowed", "not allowed", "not mapped", "unmapped", "unmapped under a wipe"],
)
def test_touching_what_is_not_there_ends_the_process(standin: StandIn, code: str, number: int) -> None:
    assert signal_of(standin, code) == number


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_call_can_be_made_to_fail_at_any_use(driver: CudaDriver, standin: StandIn, name: str) -> None:
    function = getattr(standin.library, name)
    arguments = [ctypes.byref(ctypes.create_string_buffer(64))] * len(SIGNATURES[name])
    standin.fail(f"{name.removesuffix('_v2')}:1:999:*")
    code = function(*arguments)
    standin.fail()
    assert code == (1 if name == "cuGetErrorName" else 999)


def test_an_error_without_a_name_is_still_an_error(driver: CudaDriver, standin: StandIn) -> None:
    standin.fail("cuMemCreate:1:999,cuGetErrorName:1:1,cuMemCreate:1:12345")
    assert error_of(driver.create, PAGE) == "unknown error (999)"
    assert error_of(driver.create, PAGE) == "unknown error (12345)"
    standin.fail()


def test_a_library_that_is_missing_or_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in ((tmp_path / "libcuda.so", "no CUDA driver"), ("libc.so.6", "has no cuInit")):
        monkeypatch.setenv("ROSE_CUDA_DRIVER", str(path))
        with pytest.raises(RoseError, match=message):
            CudaDriver()
