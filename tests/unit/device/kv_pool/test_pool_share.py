"""An engine's part of a pool: what its addresses show, and that an error leaves nothing half done."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.device.kv_pool.backends import MemfdBackend
from rose.device.kv_pool.ledger import PageLedger
from rose.device.kv_pool.pool_share import PoolShare
from rose.errors import Unavailable

PAGES, PAGE_BYTES = 8, 4096


class RefusingBackend:
    """A back end whose methods with these names raise as often as is written here."""

    def __init__(self, inner: MemfdBackend) -> None:
        self.inner = inner
        self.refusals: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if self.refusals.get(name, 0) > 0:
            self.refusals[name] -= 1
            return self._refuse
        return getattr(self.inner, name)

    def _refuse(self, *_: int) -> None:
        raise Unavailable("the device refuses")


@pytest.fixture
def backend() -> Iterator[RefusingBackend]:
    made = MemfdBackend.create(PAGES, PAGE_BYTES)
    yield RefusingBackend(made)
    made.close()


@pytest.fixture
def share(tmp_path: Path, backend: RefusingBackend) -> Iterator[PoolShare]:
    ledger = PageLedger(tmp_path / "ledger", PAGES, page_bytes=PAGE_BYTES, create=True)
    made = PoolShare(ledger, backend, 16)  # type: ignore[arg-type]
    yield made
    made.close()
    made.close()
    assert ledger.held == 0
    ledger.close()


def content(share: PoolShare, place: int) -> set[int]:
    return set(ctypes.string_at(share.address + place * PAGE_BYTES, PAGE_BYTES))


def test_places_get_pages_as_long_as_there_are_any(share: PoolShare) -> None:
    assert share.acquire([15, 3, 2]) == [15, 3, 2] and share.held == 3 and share.free_pages() == 5
    assert share.acquire(range(4, 12)) == [4, 5, 6, 7, 8] and share.acquire([0]) == []
    share.give_back([3, 15])
    assert share.held == 6 and not share.has(3) and share.page_at(3) is None and share.page_at(2) is not None
    assert share.address % PAGE_BYTES == 0 and share.places == 16 and share.page_bytes == PAGE_BYTES


@pytest.mark.parametrize("places", [[1, 1], [-1], [16], [0]])
def test_places_that_do_not_exist_or_are_not_empty_are_a_bug(share: PoolShare, places: list[int]) -> None:
    share.acquire([0])
    with pytest.raises(AssertionError):
        share.acquire(places)
    with pytest.raises(AssertionError):
        share.give_back([2])


def test_the_giver_wipes_its_pages_and_the_taker_wipes_them_again(share: PoolShare, backend: RefusingBackend) -> None:
    share.acquire([0])
    ctypes.memset(share.address, 0xFF, PAGE_BYTES)
    page = share.page_at(0)
    share.give_back([0])
    address = backend.inner.reserve(1)
    backend.inner.map(address, page or 0)
    assert set(ctypes.string_at(address, PAGE_BYTES)) == {0}, "wiped by the giver"
    ctypes.memset(address, 0xFF, PAGE_BYTES)
    share.acquire([5])
    assert share.page_at(5) == page and content(share, 5) == {0}, "wiped by the taker"
    backend.inner.free(address, 1)


@pytest.mark.parametrize("name", ["map", "wipe", "wait_wiped"])
def test_an_acquisition_that_fails_changes_nothing(share: PoolShare, backend: RefusingBackend, name: str) -> None:
    share.acquire([1])
    backend.refusals = {name: 1}
    with pytest.raises(Unavailable, match="refuses"):
        share.acquire([0, 2, 3])
    assert share.held == 1 == share.ledger.held and share.free_pages() == 7
    assert share.acquire([0, 2, 3]) == [0, 2, 3]


@pytest.mark.parametrize("name", ["unmap", "settle"])
def test_a_page_that_cannot_be_unmapped_stays_owned_until_it_can(
    share: PoolShare, backend: RefusingBackend, name: str
) -> None:
    backend.refusals = {"wait_wiped": 1, name: 1}
    with pytest.raises(Unavailable, match="refuses"):
        share.acquire([0])
    assert share.held == 1 == share.ledger.held and not share.has(0)
    backend.refusals = {name: 1}
    with pytest.raises(Unavailable, match="does not unmap"):
        share.acquire([0])
    assert share.acquire([0]) == [0] and share.held == 1 == share.ledger.held


@pytest.mark.parametrize("name", ["settle", "wipe", "wait_wiped", "unmap"])
def test_giving_back_that_fails_keeps_what_is_still_mapped(
    share: PoolShare, backend: RefusingBackend, name: str
) -> None:
    share.acquire([0, 1, 2])
    backend.refusals = {name: 1}
    with pytest.raises(Unavailable):
        share.give_back([0, 1, 2])
    assert share.held == 3 == share.ledger.held
    share.give_back([place for place in range(3) if share.has(place)])
    assert share.held == 0 == share.ledger.held


def test_ledger_and_pages_of_different_pools_are_a_bug(tmp_path: Path, backend: RefusingBackend) -> None:
    ledger = PageLedger(tmp_path / "other", PAGES + 1, page_bytes=PAGE_BYTES, create=True)
    with pytest.raises(AssertionError, match="different pools"):
        PoolShare(ledger, backend, 4)  # type: ignore[arg-type]
    ledger.close()
