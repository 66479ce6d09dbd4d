"""When the borrowed device is given a rest, and an owner who comes and goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rose.errors import ConfigError, Unavailable
from rose.launch.lending import STALL_S, Lending, Stall
from rose.launch.settings import load_run_settings


@pytest.mark.parametrize(
    "story, samples",
    [
        ("turns end", [(0, 8, 0.0, False), (1, 8, STALL_S + 1, False), (2, 8, 2 * STALL_S + 2, False)]),
        ("nothing to do", [(5, 0, 0.0, False), (5, 0, 99.0, False), (5, 3, 99.5, False)]),
        ("stuck", [(5, 3, 0.0, False), (5, 3, STALL_S, False), (5, 3, STALL_S + 1, True)]),
        ("stuck, then not", [(5, 3, 0.0, False), (5, 3, STALL_S + 1, True), (6, 3, STALL_S + 2, False)]),
    ],
)
def test_a_device_that_ends_nothing_is_found(story, samples):
    stall = Stall()
    assert [stall.observe(*sample[:3]) for sample in samples] == [sample[3] for sample in samples], story


class Owner(Lending):
    """Whose device answers at once, and notes what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.lines: list[bool] = []
        self.enough = asyncio.Event()
        super().__init__("http://device", "token", lambda kind, **fields: self.lines.append(fields["is_lent"]))

    async def _ask(self, method: str, action: str) -> dict[str, Any]:
        self.told.append(action)
        if len(self.told) == 5:
            self.enough.set()
        if len(self.told) == 3:
            raise Unavailable("it is away for the moment")
        return {}


def test_a_restless_owner_takes_the_device_back_and_offers_it_again():
    async def story() -> Owner:
        owner = Owner()
        restless = asyncio.create_task(owner.come_and_go(0.001, 0.001))
        await asyncio.wait_for(owner.enough.wait(), 20)
        restless.cancel()
        return owner

    owner = asyncio.run(story())
    assert owner.told[:5] == ["/drain", "/resume", "/drain", "/drain", "/resume"], "one that failed is asked again"
    assert owner.lines[:5] == [False, True, False, False, True]


@pytest.mark.parametrize("overrides", [["compare=true", "steps=4"], ["serving.is_borrowed=false"]])
def test_an_owner_cannot_come_and_go_where_steps_are_compared_or_nothing_is_lent(overrides):
    with pytest.raises(ConfigError, match="comes and goes"):
        load_run_settings(None, ["serving.owner_lends_s=4", *overrides])
    assert load_run_settings(None, ["serving.owner_lends_s=4"]).serving.owner_keeps_s == 2.0
