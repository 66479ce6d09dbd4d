"""The pool of a slime job: what turns that wait notice, and which folders hold a version."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.adapters.trl_world import FakePool, held

from rose.adapters import slime_pool, turn_watch
from rose.adapters.slime import version_number
from rose.adapters.slime_pool import SlimePool
from rose.api.requests import TurnSampling
from rose.errors import ConfigError, Unavailable

PROMPT = (1, 2, 3)


@pytest.fixture
def slime(pool: FakePool, monkeypatch: pytest.MonkeyPatch) -> SlimePool:
    monkeypatch.setattr(slime_pool, "RosePool", lambda model, **where: pool)
    monkeypatch.setattr(turn_watch, "WATCH_S", 0.02)
    return SlimePool("a-model", gateway="http://nowhere", relay="relay", run="r", patience_s=1.0)


def test_every_turn_is_a_trajectory_of_its_own_that_ends(slime: SlimePool, pool: FakePool) -> None:
    async def play() -> None:
        await asyncio.gather(*(slime.turn(PROMPT, TurnSampling(seed=seed)) for seed in range(3)))

    asyncio.run(play())
    assert len(pool.gateway.begun) == len({body.id for body in pool.gateway.begun}) == len(pool.gateway.ended) == 3


def test_a_pool_in_which_no_turn_ends_is_an_error_that_says_what_it_lacks(slime: SlimePool, pool: FakePool) -> None:
    slime._watch._stale_after_s = 0.1
    pool.gateway.pause = held()
    with pytest.raises(Unavailable, match=r"no turn has ended for 0 s: 3 turns wait at the gateway for w0 is open"):
        asyncio.run(slime.turn(PROMPT, TurnSampling()))


@pytest.mark.parametrize("name", ["weight_v1x", "delta", "weight_v" + "9" * 11])
def test_a_folder_of_another_name_is_no_version(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match="does not hold whole weights"):
        slime_pool.version_of_folder(tmp_path / name)


@pytest.mark.parametrize("label, number", [("17-0123abcd", "17"), ("0", "0"), ("a-model", "0"), ("3-x", "0")])
def test_only_labels_of_published_versions_have_a_number(label: str, number: str) -> None:
    assert version_number(label) == number
