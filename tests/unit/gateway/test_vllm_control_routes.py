"""vLLM's control routes: parsing, pauses, and which workers an update waits for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.gateway.test_turn_scheduler import World as SchedulerWorld
from tests.unit.rollout_world import PROMPT, TOKENS, World, eventually, scripted, tell

from rose.api.worker_messages import NewVersion
from rose.config.server_settings import ControlSettings
from rose.gateway.vllm_control_routes import _behind, _next_number
from rose.models.model_folder import ModelFolder

VLLM = {"control": ControlSettings(api="vllm", wait_s=0.3)}


def test_a_pause_is_kept_until_it_is_ended_and_repeats_change_nothing(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        for mode in ("abort", "keep", "wait"):
            for _ in range(2):
                assert (await found.ask("POST", f"/pause?mode={mode}&clear_cache=true"))[0] == 200
            turn = asyncio.create_task(found.turn(PROMPT, mode, max_tokens=3))
            await eventually(lambda: found.gateway.core.scheduler.waiting == 1)
            assert (await found.ask("GET", "/is_paused"))[1] == {"is_paused": True}
            for _ in range(2):
                assert (await found.ask("POST", "/resume"))[0] == 200
            assert (await turn)["token_ids"] == scripted(PROMPT, 3)
        status, reply = await found.ask("POST", "/pause?mode=sleep")
        assert status == 400 and reply["error"]["param"] == "mode"
        assert (await found.ask("GET", "/is_paused"))[1] == {"is_paused": False}

    tell(folder, story, **VLLM)


def test_a_pause_that_waits_for_turns_says_when_they_do_not_end(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        engine = await found.worker("a", step_s=0.02)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=400))
        await eventually(lambda: engine.requests == 1)
        status, reply = await found.ask("POST", "/pause?mode=wait")
        assert status == 503 and "1 turns still run" in reply["error"]["message"]
        turn.cancel()

    tell(folder, story, **VLLM)


def test_turns_do_not_expire_in_a_pause() -> None:
    world = SchedulerWorld(wait_s=1.0)
    world.join("a")
    world.scheduler.hold()
    reader = world.submit("x")
    world.now_s = 100.0
    world.scheduler.expire(world.now_s)
    assert not reader.errors and world.scheduler.waiting == 1 and world.scheduler.next_s() is None
    world.scheduler.release(world.now_s)
    assert world.scheduler.running == 1 and not reader.errors


def test_versions_of_a_trainer_are_announced_once_and_never_brought_back(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        def body(number: int) -> dict[str, Any]:
            return {"update_info": {"version": f"{number}-x", "relay": "/nowhere", "run": "run", "hash": "ab"}}

        announced = []
        core = found.gateway.core
        publish, core.publish = (
            core.publish,
            lambda version, now_s: (announced.append(version), publish(version, now_s)),
        )  # type: ignore[assignment, method-assign]
        for number in (1, 1, 2, 1, 2):
            assert (await found.ask("POST", "/update_weights", body(number)))[0] == 200
        assert announced == [NewVersion(f"{n}-x", relay="/nowhere", run="run", hash="ab") for n in (1, 2)]
        assert (await found.ask("GET", "/weight_info"))[1] == {"weight_version": "2-x"}
        for name, status in (("2-x", 200), ("1-x", 200), ("3-x", 400)):
            assert (await found.ask("POST", "/finish_weight_update", {"weight_version": name}))[0] == status
        assert (await found.ask("POST", "/finish_weight_update"))[0] == 200

    tell(folder, story, **VLLM)


def test_an_update_that_no_worker_can_load_is_an_error_that_names_them(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        assert (await found.ask("POST", "/finish_weight_update"))[0] == 200  # nothing was published yet
        info = {"version": "1-x", "relay": "/nowhere", "run": "run"}
        assert (await found.ask("POST", "/update_weights", {"update_info": info}))[0] == 200
        status, reply = await found.ask("POST", "/finish_weight_update", {"weight_version": "1-x"})
        assert status == 503 and "a: " in reply["error"]["message"]

    tell(folder, story, **VLLM)


def test_which_workers_an_update_waits_for() -> None:
    world = SchedulerWorld(max_staleness=1)
    a, b, parked = world.join("a"), world.join("b"), world.join("parked", place="parked", kind="borrowed")
    assert _behind(world.pool) == {}, "nothing was published"
    world.publish("1", a, b)
    world.publish("2")
    assert set(_behind(world.pool)) == {"a", "b"}, "within the bound, but none has shown that it can be loaded"
    a.weights.version = "2"
    assert _behind(world.pool) == {}
    world.publish("3", a)
    assert set(_behind(world.pool)) == {"b"}, "two versions behind; a parked worker is not waited for"
    b.weights.trouble = "its disk is full"
    assert _behind(world.pool) == {}, "one that cannot load it does not hold up the others"
    a.weights.version = "1"
    assert _behind(world.pool)["b"] == "its disk is full"
    assert parked.weights.version == "0"


BAD_BODIES: dict[str, Any] = {
    "/update_weights": [{}, [], {"weight_dir": 1}, {"weight_dir": "x" * 5000}, {"update_info": {"version": ""}}],
    "/areal_update_weights": [{}, {"model_path": None}, {"model_path": "x" * 5000}],
    "/init_weight_transfer_engine": [{}, {"init_info": {}}, {"init_info": {"backend": "nccl"}}, {"init_info": 1}],
    "/finish_weight_update": [{"weight_version": 7}, {"weight_version": "x" * 300}, [1]],
}


def test_bodies_that_mean_nothing_here_are_refused(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        for path, bodies in BAD_BODIES.items():
            for body in bodies:
                status, reply = await found.ask("POST", path, body)
                assert status == 400, (path, body, reply)
        status, reply = await found.ask("POST", "/update_weights", {"weight_dir": "/x"})
        assert status == 400 and "--door-folder" in reply["error"]["message"]
        for path in ("/start_weight_update", "/shutdown_weight_transfer_engine", "/reset_prefix_cache"):
            assert (await found.ask("POST", path))[0] == 200
        assert (await found.ask("POST", "/init_weight_transfer_engine", {"init_info": {"backend": "rose"}}))[0] == 200
        status, info = await found.ask("GET", "/server_info")
        assert status == 200 and info["workers"] == 0 and info["is_paused"] is False

    tell(folder, story, **VLLM)


def test_only_the_trainer_controls_and_only_where_it_was_asked_for(folder: ModelFolder) -> None:
    async def trainer_only(found: World) -> None:
        for token in (TOKENS.agent, TOKENS.worker, TOKENS.operator, "a-strangers-token"):
            for method, path in (("POST", "/pause"), ("POST", "/update_weights"), ("GET", "/weight_info")):
                assert (await found.ask(method, path, token=token))[0] in (401, 403)
        assert not found.gateway.core.scheduler.is_held

    async def absent(found: World) -> None:
        assert (await found.ask("POST", "/pause"))[0] == 404

    tell(folder, trainer_only, **VLLM)
    tell(folder, absent)


@pytest.mark.parametrize(
    "newest, number",
    [(None, 1), ("1-abcdef01", 2), ("41-x", 42), ("v7", 1), ("7", 1), ("9" * 30 + "-x", 1)],
)
def test_the_next_number_follows_the_newest_name(newest: str | None, number: int) -> None:
    assert _next_number(NewVersion(newest, "folder") if newest is not None else None) == number
