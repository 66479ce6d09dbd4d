"""A run looks at its pool once a second, and says what a user would otherwise have to guess."""

from __future__ import annotations

import asyncio
from typing import Any

from rose.run.monitor import PoolWatch, TurnCount
from rose.run.run_records import ClosedRecord


class Shown:
    """A gateway's client that shows what it was given."""

    def __init__(self) -> None:
        self.member: dict[str, Any] = {
            "name": "borrowed", "kind": "borrowed", "state": "open", "trouble": "", "turns": 0, "turns_ended": 0,
        }  # fmt: skip

    async def pool(self) -> dict[str, Any]:
        return {"members": [self.member], "counts": {}, "version": None}


def test_a_worker_that_closes_by_itself_is_told_once_with_its_reason():
    client, words, records = Shown(), [], []
    watch = PoolWatch(client, lambda sample: None, records.append, words.append)
    stopped = {"state": "closed", "trouble": "circuit breaker: 10 of 10 lent steps longer than their estimate"}
    for change in ({}, stopped, {}, {"state": "open", "trouble": ""}, stopped):
        client.member |= change
        asyncio.run(watch.look())
    assert words == [f"worker borrowed takes no turns for a while: {stopped['trouble']}"] * 2
    assert [type(record) is ClosedRecord and record.worker for record in records] == ["borrowed"] * 2


def test_a_worker_that_its_owner_holds_or_that_only_refused_is_not_told():
    client, words = Shown(), []
    watch = PoolWatch(client, lambda sample: None, say=words.append)
    for change in ({"state": "held", "trouble": "paused by the owner"}, {"state": "closed", "trouble": ""}):
        client.member |= change
        asyncio.run(watch.look())
    assert words == []


def test_turns_are_counted_over_restarts():
    count = TurnCount()
    member = {"name": "w", "kind": "dedicated", "turns_ended": 10}
    assert count.observe([member])["dedicated"] == 10
    assert count.observe([member | {"turns_ended": 15}])["dedicated"] == 15
    assert count.observe([])["dedicated"] == 15
    assert count.observe([member | {"turns_ended": 4}])["dedicated"] == 19, "it was restarted and counts from 0"
