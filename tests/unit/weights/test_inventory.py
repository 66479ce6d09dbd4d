"""The inventory of a relay: what is listed, what is wrong with it, and what may be deleted."""

from __future__ import annotations

from tests.contract.chain_ends import (
    RUN,
    SECRET,
    Story,
)
from tests.unit.weights.test_manifest import NAMES
from tests.unit.weights.test_writing import JUNK

from rose.weights.inventory import read_inventory


def test_the_inventory_counts_signed_claims_only() -> None:
    story = Story()
    story.relay.put_new(NAMES.claim(7), [JUNK])
    assert read_inventory(story.relay, RUN, SECRET).epochs == (1,)
