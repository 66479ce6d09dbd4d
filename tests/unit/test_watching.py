"""A run looks at its pool once a second, and says what a user would otherwise have to guess."""

from __future__ import annotations

import asyncio
from typing import Any

from rose.launch.watching import PoolWatch


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
    watch = PoolWatch(client, lambda sample: None, lambda kind, **fields: records.append((kind, fields)), words.append)
    stopped = {"state": "closed", "trouble": "circuit breaker: 10 of 10 lent steps longer than their estimate"}
    for change in ({}, stopped, {}, {"state": "open", "trouble": ""}, stopped):
        client.member |= change
        asyncio.run(watch.look())
    assert words == [f"worker borrowed takes no turns for a while: {stopped['trouble']}"] * 2
    assert [(kind, fields["worker"]) for kind, fields in records] == [("closed", "borrowed")] * 2


def test_a_worker_that_its_owner_holds_or_that_only_refused_is_not_told():
    client, words = Shown(), []
    watch = PoolWatch(client, lambda sample: None, say=words.append)
    for change in ({"state": "held", "trouble": "paused by the owner"}, {"state": "closed", "trouble": ""}):
        client.member |= change
        asyncio.run(watch.look())
    assert words == []
