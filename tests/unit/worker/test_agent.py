"""What a lent device's agent tells a gateway of its owner, and what it does when it is told. Over real connections."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.unit.gateway.conftest import folder
from tests.unit.rollout_world import PROMPT, LoopEngine, World, eventually, scripted, tell

from rose.api.worker_messages import CONNECT_PATH, EvictTurn, Welcome
from rose.errors import Unavailable
from rose.models.model_folder import ModelFolder
from rose.worker.agent import AgentSettings, run_agent
from rose.worker.turn_executor import TurnExecutor

__all__ = ["folder"]


async def lent(found: World, name: str, **changes: Any) -> LoopEngine:
    engine = await found.worker(name, kind="borrowed", **changes)
    engine.lend()
    await eventually(lambda: (member := found.gateway.core.pool.get(name)) is not None and member.heartbeat.can_park)
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
def test_a_device_that_is_not_lending_gets_no_turns(
    folder: ModelFolder, story: str, changes: dict[str, Any], state: str
) -> None:
    async def told(found: World) -> None:
        engine = await lent(found, "a", step_s=0.001)
        engine.lend(**changes)
        engine.refusal = Unavailable("it would refuse")
        member = found.gateway.core.pool.get("a")
        assert member is not None
        await eventually(lambda: not member.heartbeat.gate_open)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=5))
        await eventually(lambda: found.gateway.core.scheduler.waiting == 1)
        _, pool = await found.ask("GET", "/v1/pool")
        shown = state_of(pool, "a")
        assert (shown["state"], shown["trouble"], shown["slack_s"]) == (state, changes["why"], 0.2)
        engine.refusal = None
        engine.lend(state="lending", model="resident", why="", is_resting=False)
        assert (await turn)["token_ids"] == scripted(PROMPT, 5)
        assert found.gateway.core.scheduler.counts.refused == 0

    tell(folder, told)


def test_admission_blocked_by_serving_is_reported_as_open(folder: ModelFolder) -> None:
    async def told(found: World) -> None:
        engine = await lent(found, "a")
        member, pool = found.gateway.core.pool.get("a"), found.gateway.core.pool
        assert member is not None and pool.view(member).blocked_since_s is None
        joined_s = pool.view(member).opened_s
        engine.lend(shut_s=0.5)
        await eventually(lambda: pool.view(member).blocked_since_s is not None)
        assert pool.view(member).is_open
        _, shown = await found.ask("GET", "/v1/pool")
        assert state_of(shown, "a")["shut_s"] >= 0.5
        engine.lend(shut_s=None)
        await eventually(lambda: pool.view(member).blocked_since_s is None)
        assert pool.view(member).opened_s > joined_s

    tell(folder, told)


def test_a_device_is_parked_without_work_and_activated_for_a_turn(folder: ModelFolder) -> None:
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
        await eventually(lambda: found.gateway.core.scheduler.counts.tokens > 2)
        await lent(found, "b")
        await eventually(lambda: found.gateway.core.provisioning.returns == 1)
        assert (await turn)["token_ids"] == scripted(PROMPT, 60)

    tell(folder, told, borrowed_max=1)


async def gateway_that_says(frame: bytes, joined: list[str]) -> tuple[web.AppRunner, str]:
    """Welcomes every agent, then says this."""

    async def connect(request: web.Request) -> web.StreamResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        await connection.receive()
        joined.append("one more")
        await connection.send_bytes(msgspec.msgpack.encode([Welcome(0.1)]))
        await connection.send_bytes(frame)
        await connection.receive()
        while not connection.closed:
            await connection.receive()
        return connection

    app = web.Application()
    app.router.add_get(CONNECT_PATH, connect)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.mark.parametrize("frame", [
    b"\x91\x82\xa4type\xa5Leave\xa3why\xa1\xff",
    b"\x91" * 100_000,
    b"nonsense",
    msgspec.msgpack.encode([EvictTurn(3)]),
], ids=["utf-8", "deep", "nonsense", "an errand that fails"])  # fmt: skip
def test_an_agent_reconnects_whatever_a_gateway_sends(
    frame: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(runner: TurnExecutor, attempt_id: int) -> None:
        raise ZeroDivisionError("an error that was not foreseen")

    monkeypatch.setattr(TurnExecutor, "evict", fail)
    caplog.set_level(logging.ERROR)

    async def story() -> None:
        joined: list[str] = []
        runner, url = await gateway_that_says(frame, joined)
        engine = LoopEngine()
        agent = asyncio.create_task(run_agent(engine, AgentSettings(url, "token", "model", "dedicated", 4, "a")))
        await eventually(lambda: len(joined) >= 3)
        assert not agent.done()
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        await engine.close()
        await runner.cleanup()

    asyncio.run(story())
    assert bool(caplog.records) == (frame == msgspec.msgpack.encode([EvictTurn(3)])), "only what was not foreseen"


def test_a_device_joins_one_of_several_gateways_by_its_name() -> None:
    settings = AgentSettings("http://a, http://b", "token", "m", "dedicated", 1, "w")
    first = settings.at_first()
    assert first.shards == ("http://a", "http://b") and first.gateway in first.shards
    assert settings.at_first() == first and not first.has_moved
    spread = {replace(settings, name=f"w{number}").at_first().gateway for number in range(20)}
    assert spread == {"http://a", "http://b"}
    moved = first.at_shard(1)
    assert (moved.gateway, moved.has_moved, moved.name) == ("http://b", True, "w")
    with pytest.raises(Unavailable, match="to shard 2, and it knows 2"):
        first.at_shard(2)


def test_a_device_of_one_gateway_moves_nowhere() -> None:
    settings = AgentSettings("http://a", "token", "m", "dedicated", 1)
    assert settings.at_first() == settings
    with pytest.raises(Unavailable):
        settings.at_shard(0)
