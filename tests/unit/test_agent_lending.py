"""What a lent device's agent tells a gateway of its owner, and what it does when it is told. Over real connections."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.rollout_world import LoopEngine, World, eventually
from tests.unit.test_gateway import PROMPT, folder, scripted, tell

from rose.errors import Unavailable
from rose.models.folder import ModelFolder

__all__ = ["folder"]


async def lent(found: World, name: str, **changes: Any) -> LoopEngine:
    engine = await found.worker(name, kind="borrowed", **changes)
    engine.lend()
    await eventually(lambda: (member := found.gateway.pool.get(name)) is not None and member.beat is not None)
    return engine


def state_of(pool: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [member for member in pool["members"] if member["name"] == name]
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "story, changes, state",
    [
        ("paused", {"state": "paused", "why": "paused by the owner"}, "held"),
        ("drained", {"state": "drained", "model": "parked", "why": "drained by the owner"}, "held"),
        ("resting", {"is_resting": True, "why": "circuit breaker: 3 deadlines lost"}, "closed"),
    ],
)
def test_a_device_that_lends_nothing_says_so_and_is_offered_nothing(
    folder: ModelFolder, story: str, changes: dict[str, Any], state: str
) -> None:
    async def told(found: World) -> None:
        engine = await lent(found, "a", step_s=0.001)
        engine.lend(**changes)
        engine.refusal = Unavailable("it would refuse")
        member = found.gateway.pool.get("a")
        assert member is not None
        await eventually(lambda: not member.gate_open)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=5))
        await eventually(lambda: found.gateway.scheduler.waiting == 1)
        _, pool = await found.ask("GET", "/v1/pool")
        shown = state_of(pool, "a")
        assert (shown["state"], shown["trouble"], shown["slack_s"]) == (state, changes["why"], 0.2)
        engine.refusal = None
        engine.lend(state="lending", model="resident", why="", is_resting=False)
        assert (await turn)["token_ids"] == scripted(PROMPT, 5)
        assert found.gateway.scheduler.counts.refused == 0

    tell(folder, told)


def test_a_gate_that_serving_shuts_is_told_and_the_device_is_still_open(folder: ModelFolder) -> None:
    async def told(found: World) -> None:
        engine = await lent(found, "a")
        member, pool = found.gateway.pool.get("a"), found.gateway.pool
        assert member is not None and pool.view(member).gated_since_s is None
        engine.lend(shut_s=0.5)
        await eventually(lambda: pool.view(member).gated_since_s is not None)
        assert pool.view(member).is_open
        _, shown = await found.ask("GET", "/v1/pool")
        assert state_of(shown, "a")["shut_s"] >= 0.5
        engine.lend(shut_s=None)
        await eventually(lambda: pool.view(member).gated_since_s is None)
        assert pool.view(member).opened_s > member.joined_s

    tell(folder, told)


def test_a_device_is_parked_when_there_is_no_work_and_is_back_for_the_next_turn(folder: ModelFolder) -> None:
    async def told(found: World) -> None:
        engine = await lent(found, "a")
        await eventually(lambda: engine.lending_status is not None and engine.lending_status.state == "parked")
        assert (await found.turn(PROMPT, "s", max_tokens=5))["token_ids"] == scripted(PROMPT, 5)
        assert engine.lending_status is not None
        _, pool = await found.ask("GET", "/v1/pool")
        first, second = pool["allocation"][:2]
        assert first["returned_s"] <= first["released_s"] <= second["chosen_s"] <= second["usable_s"] <= pool["now_s"]
        _, metrics = await found.ask("GET", "/metrics")
        assert b"rose_gateway_borrows_total 2.0" in metrics and b"rose_gateway_allocation_overhead_seconds" in metrics

    tell(folder, told, return_after_s=0.3, wait_s=20.0)


def test_turns_on_a_device_that_is_parked_go_on_elsewhere(folder: ModelFolder) -> None:
    async def told(found: World) -> None:
        await lent(found, "a", step_s=0.01)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=60))
        await eventually(lambda: found.gateway.scheduler.counts.tokens > 2)
        await lent(found, "b")
        await eventually(lambda: found.gateway.books.provisioning.returns == 1)
        assert (await turn)["token_ids"] == scripted(PROMPT, 60)

    tell(folder, told, borrowed_max=1)
