"""What every kind of KV pool must do, seen by two real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.pool_processes import Died, Nursery, PoolProcess

PAGES, PLACES = 12, 12
PAGE_BYTES = {"memfd": 64 << 10, "cuda": 2 << 20}


@pytest.fixture(scope="module", params=["memfd", "cuda"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def nursery(kind: str, request: pytest.FixtureRequest) -> Iterator[Nursery]:
    made = Nursery(**({"ROSE_CUDA_DRIVER": str(request.getfixturevalue("standin").path)} if kind == "cuda" else {}))
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "pool")


@pytest.fixture
def serving(nursery: Nursery, kind: str, folder: str) -> Iterator[PoolProcess]:
    process = nursery.start()
    assert process.call("create", folder, PAGES, kind, PAGE_BYTES[kind], PLACES) == process.pid
    yield process
    process.kill()


@pytest.fixture
def borrower(nursery: Nursery, serving: PoolProcess, folder: str) -> Iterator[PoolProcess]:
    process = nursery.start()
    assert process.call("join", folder, PLACES) == process.pid
    yield process
    process.kill()


def some(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_an_engine_gets_as_many_pages_as_are_free_in_order(serving: PoolProcess, borrower: PoolProcess) -> None:
    assert serving.call("acquire", [5, 1, 3]) == [5, 1, 3]
    assert borrower.call("acquire", some(0, 12)) == some(0, 9)
    assert serving.call("acquire", [0]) == [] and serving.call("free_pages") == 0
    borrower.call("give_back", [4, 7])
    assert serving.call("acquire", [0, 2, 4]) == [0, 2] and borrower.call("free_pages") == 0


def test_no_page_has_two_owners(serving: PoolProcess, borrower: PoolProcess) -> None:
    serving.call("acquire", some(0, 5))
    borrower.call("acquire", some(0, 12))
    ours, theirs = set(serving.call("pages").values()), set(borrower.call("pages").values())
    assert len(ours) == 5 and len(theirs) == 7 and not ours & theirs
    owners = {int(page): pid for page, pid in serving.call("owners").items()}
    assert owners == dict.fromkeys(ours, serving.pid) | dict.fromkeys(theirs, borrower.pid)


def test_a_page_is_zero_when_it_is_taken(serving: PoolProcess, borrower: PoolProcess) -> None:
    for place in borrower.call("acquire", some(0, 12)):
        assert borrower.call("content", place) == [0]
        borrower.call("fill", place, 0xFF)
    borrower.call("give_back", some(0, 6))
    for place in serving.call("acquire", some(0, 6)):
        assert serving.call("content", place) == [0]
        serving.call("fill", place, 0x11)
    borrower.kill()
    assert all(serving.call("content", place) == [0] for place in serving.call("acquire", some(6, 6)))
    assert all(serving.call("content", place) == [0x11] for place in some(0, 6))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_borrower_frees_its_pages_and_a_stopped_one_does_not(
    serving: PoolProcess, borrower: PoolProcess, number: int
) -> None:
    serving.call("acquire", some(0, 2))
    borrower.call("acquire", some(0, 6))
    borrower.signal(number)
    if number == signal.SIGSTOP:
        assert serving.call("acquire", some(2, 10)) == some(2, 4), "serving gets what is free, and does not wait"
    borrower.kill()
    held = len(serving.call("pages"))
    assert serving.call("acquire", some(held, 12 - held)) == some(held, 12 - held)
    assert serving.call("owners") == {str(page): serving.pid for page in range(PAGES)}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["map", "wipe", "wait_wiped", "settle", "unmap"])
def test_a_borrower_killed_inside_a_call_loses_no_page(
    serving: PoolProcess, borrower: PoolProcess, name: str, after: bool
) -> None:
    borrower.call("acquire", [0, 2, 4])
    borrower.call("die_at", name, 2 if name in ("map", "unmap", "wipe") else 1, after)
    call = ("give_back", [0, 2, 4]) if name in ("settle", "unmap") else ("acquire", [5, 7])
    with pytest.raises(Died):
        borrower.call(*call)
    assert serving.call("free_pages") == PAGES
    assert serving.call("acquire", some(0, 12)) == some(0, 12)
    assert all(serving.call("content", place) == [0] for place in some(0, 12))


@pytest.mark.parametrize("after", [False, True])
def test_serving_killed_while_it_hands_out_the_pages(
    nursery: Nursery, serving: PoolProcess, folder: str, after: bool
) -> None:
    serving.call("die_at", "export", 1, after)
    borrower = nursery.start()
    assert "Unavailable" in borrower.call("join", folder, PLACES)
    borrower.kill()


def test_a_serving_engine_that_is_stopped_is_not_waited_for_without_end(
    nursery: Nursery, serving: PoolProcess, folder: str
) -> None:
    serving.signal(signal.SIGSTOP)
    borrower = nursery.start()
    assert "ended or stopped" in borrower.call("join", folder, PLACES, 0.1)
    borrower.kill()


def test_one_borrower_after_the_other(nursery: Nursery, serving: PoolProcess, folder: str) -> None:
    for ends_well in (True, False, True):
        borrower = nursery.start()
        borrower.call("join", folder, PLACES)
        assert borrower.call("acquire", some(0, 12)) == some(0, 12)
        if ends_well:
            borrower.call("close")
            assert serving.call("free_pages") == PAGES
        borrower.kill()
        assert serving.call("free_pages") == PAGES


def test_a_borrower_killed_while_it_joins_keeps_no_other_out(
    nursery: Nursery, serving: PoolProcess, folder: str
) -> None:
    first, second = nursery.start(), nursery.start()
    first.begin("join", folder, PLACES)
    first.kill()
    assert second.call("join", folder, PLACES) == second.pid
    second.kill()


def test_a_borrower_sees_that_serving_has_ended_and_a_new_one_starts_afresh(
    nursery: Nursery, serving: PoolProcess, borrower: PoolProcess, kind: str, folder: str
) -> None:
    borrower.call("acquire", some(0, 4))
    borrower.call("fill", 3, 7)
    assert borrower.call("serving_pid") == serving.pid
    serving.kill()
    assert borrower.call("serving_pid") is None
    assert borrower.call("content", 3) == [7], "memory lives until the last process has let go"
    after = nursery.start()
    after.call("create", folder, PAGES, kind, PAGE_BYTES[kind], PLACES)
    assert after.call("free_pages") == PAGES, "the pages of the pool before are not this pool's"
    after.kill()


def test_a_second_serving_engine_is_refused(nursery: Nursery, serving: PoolProcess, kind: str, folder: str) -> None:
    second = nursery.start()
    refusal = second.call("create", folder, PAGES, kind, PAGE_BYTES[kind], PLACES)
    assert refusal.startswith("Unavailable: another serving engine") and str(serving.pid) in refusal
    assert serving.call("acquire", [0]) == [0], "the first is not disturbed"
    second.kill()


def test_a_closed_engine_leaves_everything_free(serving: PoolProcess, borrower: PoolProcess) -> None:
    borrower.call("acquire", some(3, 6))
    borrower.call("close")
    assert serving.call("owners") == {} and os.path.exists(f"/proc/{borrower.pid}")
