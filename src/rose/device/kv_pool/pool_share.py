"""One engine's part of a pool: addresses for all its KV memory, and pages behind some of them.

A *place* is a page-sized part of the addresses. The process that maps a page also holds its lock, so the two end
together. Pages are wiped when they are taken and again when they are given back: a number that another model left can
be a NaN, which spoils every answer of an attention kernel that multiplies masked places by zero, and the KV of users is
not for rollouts to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from rose.device.kv_pool.backends import PageBackend
from rose.device.kv_pool.host_memory import runs
from rose.device.kv_pool.ledger import PageLedger
from rose.errors import RoseError, Unavailable

RELEASED_AT_ONCE = 16  # pages: the taker gets the first while the giver still wipes the others


class PoolShare:
    """The pages of one engine. A call that fails leaves every page either mapped and owned, or neither."""

    def __init__(self, ledger: PageLedger, backend: PageBackend, places: int) -> None:
        """Reserve addresses; ledger and backend stay the caller's to close. Raises Unavailable."""
        assert (ledger.pages, ledger.page_bytes) == (backend.pages, backend.page_bytes), "two different pools"
        self.ledger = ledger
        self.places = places
        self.page_bytes = backend.page_bytes
        self.address = backend.reserve(places)
        self._backend = backend
        self._page_at: dict[int, int] = {}
        self._broken: dict[int, int] = {}  # places whose page could not be unmapped after an error

    @property
    def held(self) -> int:
        """The pages that this engine keeps from others."""
        return len(self._page_at) + len(self._broken)

    def has(self, place: int) -> bool:
        """Return whether there is memory behind this place."""
        return place in self._page_at

    def page_at(self, place: int) -> int | None:
        """Return the page behind this place."""
        return self._page_at.get(place)

    def free_pages(self) -> int:
        """Return how many pages of the pool could be taken now."""
        return self.ledger.free_count()

    def acquire(self, places: Sequence[int]) -> list[int]:
        """Put zeroed pages behind as many of these places as there are free pages, and return those, in order.

        Raises Unavailable if the device refuses; then no place has changed.
        """
        assert len(set(places)) == len(places), "a place is named twice"
        assert all(0 <= place < self.places and place not in self._page_at for place in places), "not an empty place"
        self._mend(places)
        pages = self.ledger.own_up_to(len(places))
        chosen = list(places[: len(pages)])
        try:
            for place, page, count in runs(chosen, pages):
                self._backend.map(self._at(place), page, count)
            self._wipe(chosen)
        except BaseException:
            self._broken.update(zip(chosen, pages))
            self._unmap_broken()
            raise
        self._page_at.update(zip(chosen, pages))
        return chosen

    def give_back(self, places: Sequence[int]) -> None:
        """Let other engines have the pages behind these places. The engine must no longer use them.

        Raises Unavailable if the device refuses; then some still have their pages, with undefined content.
        """
        assert len(set(places)) == len(places), "a place is named twice"
        assert all(place in self._page_at for place in places), "a place without a page"
        self._mend(())
        self._backend.settle()
        ordered = sorted(places)
        for first in range(0, len(ordered), RELEASED_AT_ONCE):
            self._release(ordered[first : first + RELEASED_AT_ONCE])

    def close(self) -> None:
        """Give everything back, and the addresses too. Twice is harmless."""
        if self.address:
            self.give_back(list(self._page_at))
            self._mend(list(self._broken))
            self._backend.free(self.address, self.places)
            self.address = 0

    def _release(self, places: Sequence[int]) -> None:
        self._wipe(places)
        unmapped: list[int] = []
        try:
            for place in places:
                self._backend.unmap(self._at(place))
                unmapped.append(place)
        finally:
            self.ledger.give_up([self._page_at.pop(place) for place in unmapped])

    def _at(self, place: int) -> int:
        return self.address + place * self.page_bytes

    def _wipe(self, places: Iterable[int]) -> None:
        ordered = sorted(places)
        for place, _, count in runs(ordered, ordered):
            self._backend.wipe(self._at(place), count)
        self._backend.wait_wiped()

    def _unmap_broken(self) -> None:
        """Give up what an error has left. A page that cannot be unmapped keeps its lock: two engines could use it."""
        with suppress(RoseError):
            self._backend.settle()  # a wipe that was begun may still be writing
            for place in list(self._broken):
                self._backend.unmap(self._at(place))
                self.ledger.give_up([self._broken.pop(place)])

    def _mend(self, places: Sequence[int]) -> None:
        """Try again to unmap what an error has left. Raises Unavailable if one of these places cannot be used."""
        if self._broken:
            self._unmap_broken()
            if not self._broken.keys().isdisjoint(places):
                raise Unavailable("the device does not unmap a KV page", hint="restart this engine")
