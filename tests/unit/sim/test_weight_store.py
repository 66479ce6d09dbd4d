"""The weights of a simulated world come over a real chain of versions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose.errors import Unavailable
from rose.sim.simulated_handle import weights_in
from rose.sim.weight_store import StoreFetcher, WeightStore


@pytest.fixture
def store() -> Iterator[WeightStore]:
    made = WeightStore()
    yield made
    made.close()


def test_an_agent_fetches_what_was_published(store: WeightStore) -> None:
    fetcher = StoreFetcher(store, "a")
    for version in ("1", "2"):
        wanted = store.put(version)
        fetched = fetcher.fetch(wanted)
        fetcher.on_installed(fetched)
        assert (weights_in(fetched.folder), fetched.hash) == (int(version), wanted.hash)
    fetcher.close()


def test_a_version_is_published_once(store: WeightStore) -> None:
    first = store.put("1")
    assert store.put("1") == first and first.hash == store.hash_of(1)
    assert store.put("2").hash != first.hash


def test_a_liar_keeps_the_previous_weights_and_reports_their_hash(store: WeightStore) -> None:
    wanted = [store.put(version) for version in ("1", "2")][-1]
    store.liars.add("liar")
    fetcher = StoreFetcher(store, "liar")
    fetched = fetcher.fetch(wanted)
    assert weights_in(fetched.folder) == 1 and fetched.hash == store.hash_of(1) != wanted.hash
    fetcher.close()


def test_a_closed_relay_is_unavailable_until_it_opens(store: WeightStore) -> None:
    wanted, fetcher = store.put("1"), StoreFetcher(store, "a")
    store.relay.is_closed = True
    with pytest.raises(Unavailable):
        fetcher.fetch(wanted)
    store.relay.is_closed = False
    assert fetcher.fetch(wanted).hash == wanted.hash
    fetcher.close()
