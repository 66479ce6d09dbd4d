"""The gateway's core: gaps in its time, and turns that were given up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.unit.core_world import World, kinds
from tests.unit.ledger_world import SAMPLING, alone

from rose.engines.base import Request
from rose.engines.token_stream import TokenStream
from rose.errors import Unavailable


def test_a_reader_of_a_turn_just_given_up_must_ask_again(path: Path) -> None:
    gateway = alone(path, wait_s=1.0)
    session = gateway.core.trajectories.open("s", 0.0)
    turn, seed = session.turn_of((1,), SAMPLING, None)
    gateway.ask("s", 1)
    gateway.core.tick(0.9)
    gateway.core.tick(1.8)
    assert not session.turns
    request = Request("again", (1,), msgspec.structs.replace(SAMPLING, seed=seed))
    with pytest.raises(Unavailable, match="again"):
        gateway.core.turn(turn, request, TokenStream(), 2.0, affinity="s", whole=True)


def test_leases_and_turns_get_time_after_the_gateway_stood_still() -> None:
    world = World()
    world.join("a")
    world.ask()
    world.wait(1.0)
    world.now_s += 60.0  # stopped, or the machine slept
    world.core.tick(world.now_s)
    assert world.core.pool.get("a") is not None and kinds(world.told["a"]) == ["Turn"]
    world.silent.add("a")
    world.wait(6.0)
    assert world.core.pool.get("a") is None
