"""Orders to workers over HTTP, and how the gateway and its workers carry them out."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout_world import TOKENS, LoopEngine, World, eventually, tell

from rose.api.worker_messages import Heartbeat, Join
from rose.models.model_folder import ModelFolder

ORDERS = "/v1/pool/orders"


async def order(world: World, action: str, **scope: Any) -> dict[str, Any]:
    status, reply = await world.ask("POST", ORDERS, {"action": action, **scope}, token=TOKENS.operator)
    assert status == 200, reply
    found: dict[str, Any] = reply
    return found


async def states(world: World) -> dict[str, str]:
    _, pool = await world.ask("GET", "/v1/pool")
    return {worker["name"]: worker["state"] for worker in pool["members"]}


async def lent(world: World, name: str, **labels: str) -> LoopEngine:
    engine = await world.worker(name, kind="borrowed", labels=labels)
    await eventually(lambda: world.gateway.core.pool.get(name) is not None)
    engine.lend()
    await eventually(lambda: world.gateway.core.pool.get(name).heartbeat.can_park)  # type: ignore[union-attr]
    return engine


@pytest.mark.parametrize("body", [
    {"action": "pause"},
    {"action": "pause", "all": True, "workers": ["a"]},
    {"action": "pause", "labels": {"a": "b"}, "workers": ["a"]},
    {"action": "pause", "all": True, "turns_max": 3},
    {"action": "explode", "all": True},
    {"action": "limits", "all": True, "turns_max": 0},
    {"action": "pause", "workers": [""]},
    {"action": "pause", "labels": {f"k{number}": "" for number in range(17)}},
    {"action": "pause", "all": True, "more": 1},
])  # fmt: skip
def test_an_order_that_is_not_clear_is_refused_and_changes_nothing(folder: ModelFolder, body: Any) -> None:
    async def story(world: World) -> None:
        assert (await world.ask("POST", ORDERS, body, token=TOKENS.operator))[0] == 400
        assert world.gateway.core.fleet.newest_number == 0

    tell(folder, story)


def test_only_the_operator_gives_orders(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        body = {"action": "resume", "all": True}
        for token, status in ((TOKENS.trainer, 403), (TOKENS.agent, 403), (TOKENS.worker, 403), ("wrong", 401)):
            assert (await world.ask("POST", ORDERS, body, token=token))[0] == status
        assert (await world.ask("GET", ORDERS, token=TOKENS.trainer))[0] == 200
        assert (await world.ask("GET", ORDERS, token=TOKENS.agent))[0] == 403

    tell(folder, story)


def test_a_page_of_another_site_gives_no_orders(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            headers |= {"Authorization": f"Bearer {TOKENS.operator}"}
            for method, path in (("POST", ORDERS), ("GET", "/ui"), ("GET", "/ui/events"), ("GET", "/ui/trajectories")):
                async with world.http.request(method, world.url + path, headers=headers, json={}) as reply:
                    assert reply.status == 403, path

    tell(folder, story)


def test_turns_of_a_paused_worker_continue_elsewhere_and_return_after_resume(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        await world.worker("a", step_s=0.02)
        pool = world.gateway.core.pool
        turn = asyncio.create_task(world.turn([1, 2, 3], "s", max_tokens=100))
        await eventually(lambda: bool(pool.get("a").placement.attempt_ids))  # type: ignore[union-attr]
        await world.worker("b", step_s=0.0)
        assert (await order(world, "pause", workers=["a"]))["matched"] == ["a"]
        reply = await turn
        assert len(reply["token_ids"]) == 100 and (await states(world)) == {"a": "paused", "b": "open"}
        await order(world, "pause", all=True)
        refused = asyncio.create_task(world.refused([4], max_tokens=1))
        assert await refused == 503
        await order(world, "resume", workers=["a"])
        await world.turn([5], max_tokens=1)
        assert (await states(world)) == {"a": "open", "b": "paused"}

    tell(folder, story, wait_s=0.5)


def test_a_drained_device_parks_its_model_and_loads_it_again_after_resume(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        engine = await lent(world, "a", rack="a3")
        other = await lent(world, "b", rack="a4")
        reply = await order(world, "drain", labels={"rack": "a3"})
        assert reply["matched"] == ["a"]
        await eventually(lambda: engine.lending_status.model == "parked")  # type: ignore[union-attr]
        assert other.lending_status.model == "resident"  # type: ignore[union-attr]
        assert (await states(world))["a"] == "drained"
        await order(world, "resume", all=True)
        await world.turn([1], max_tokens=1)
        await eventually(lambda: engine.lending_status.model == "resident" or world.gateway.core.provisioning.borrowed)  # type: ignore[union-attr]
        assert (await states(world))["a"] != "drained"

    tell(folder, story)


def test_an_order_never_resumes_what_the_owner_stopped(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        engine = await lent(world, "a")
        engine.lend(state="paused", why="paused by the owner")
        await eventually(lambda: not world.gateway.core.pool.get("a").heartbeat.is_offered)  # type: ignore[union-attr]
        await order(world, "resume", all=True)
        assert await states(world) == {"a": "held"} and engine.lending_status.state == "paused"  # type: ignore[union-attr]

    tell(folder, story)


def test_a_limit_bounds_the_turns_of_a_worker_and_moves_the_newest(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        await world.worker("a", step_s=0.02)
        placement = world.gateway.core.pool.get("a").placement  # type: ignore[union-attr]
        turns = [asyncio.create_task(world.turn([number], f"s{number}", max_tokens=40)) for number in range(4)]
        await eventually(lambda: len(placement.attempt_ids) == 4)
        oldest = min(placement.attempt_ids)
        await order(world, "limits", workers=["a"], turns_max=1)
        await eventually(lambda: placement.attempt_ids == {oldest})
        await order(world, "limits", workers=["a"])
        assert [len(reply["token_ids"]) for reply in await asyncio.gather(*turns)] == [40] * 4

    tell(folder, story)


def test_an_order_holds_for_workers_that_join_later_and_over_a_restart(folder: ModelFolder, tmp_path: Path) -> None:
    ledger = str(tmp_path / "ledger.sqlite")

    async def first(world: World) -> None:
        reply = await order(world, "pause", workers=["a"])
        assert reply["absent"] == ["a"] and reply["matched"] == [] and reply["is_durable"]
        await order(world, "drain", labels={"rack": "a3"})

    async def second(world: World) -> None:
        await world.worker("a")
        await world.worker("b", labels={"rack": "a3"})
        await world.worker("c")
        await eventually(lambda: len(world.gateway.core.pool) == 3)
        assert await states(world) == {"a": "paused", "b": "drained", "c": "open"}
        _, stored = await world.ask("GET", ORDERS, token=TOKENS.operator)
        assert [(one["action"], one["target"]) for one in stored["history"]] == [("pause", "a"), ("drain", "rack=a3")]
        assert (await order(world, "resume", all=True))["number"] == 3

    tell(folder, first, ledger=ledger)
    tell(folder, second, ledger=ledger)


def test_without_a_ledger_an_order_says_that_it_is_not_kept(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        assert not (await order(world, "pause", all=True))["is_durable"]

    tell(folder, story)


def test_one_request_orders_a_thousand_workers(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        core, sent = world.gateway.core, []
        model, now_s = world.gateway.context.model_name, time.monotonic()
        for number in range(1000):
            join = Join(f"w{number:04}", "borrowed", model, "0", 8, 4096, 4096)
            worker = core.join(join, sent.append, now_s)
            core.receive(worker, Heartbeat(0, 0, 0, 4096, "0", True, can_park=True), now_s)
        reply = await order(world, "drain", all=True)
        assert len(reply["matched"]) == 1000
        assert sum(type(message).__name__ == "Park" for message in sent) == 1000

    tell(folder, story)
