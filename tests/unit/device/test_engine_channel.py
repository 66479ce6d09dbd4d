"""One connection to an engine: how it ends, and who learns of that."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.device.test_supervision import broken

from rose.device.engine_channel import Channel
from rose.errors import Unavailable


def test_a_channel_whose_exit_reason_fails_still_fails_its_users(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(Channel, "_exit_reason", lambda self: broken())
        found = Channel()
        found.connection_lost(None)
        async with asyncio.timeout(10):
            assert "KeyError" in (await found.gone).what
            with pytest.raises(Unavailable):
                await found._ready

    asyncio.run(story())


def test_an_unreadable_event_ends_the_engine_and_not_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        given_up: list[str] = []
        found = Channel()
        monkeypatch.setattr(found, "kill", lambda: given_up.append("given up"))
        body = b"\x82\xa4type\xa8Progress\xa4what\xa2\xff\xfe"  # a text that is not UTF-8
        found.data_received(len(body).to_bytes(4, "little") + body)
        assert given_up == ["given up"] and found._failure is not None
        found.connection_lost(None)
        await found.gone

    asyncio.run(story())
