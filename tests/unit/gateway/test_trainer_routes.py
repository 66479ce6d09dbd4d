"""The routes of trainers, environments and operators, and what agents may do with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.hostile_worker import begin
from tests.unit.rollout_world import CHAT, PROMPT, TOKENS, World, eventually, scripted, tell

from rose.api.trajectories import Batch, BeginBody, FinishBody
from rose.api.worker_messages import (
    CONNECT_PATH,
)
from rose.client import GatewayClient
from rose.models.model_folder import ModelFolder


def test_new_weights_reach_all_workers_and_those_that_join_later(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=100))
        await eventually(lambda: found.gateway.core.scheduler.counts.tokens > 5)
        body = {"version": "v1", "folder": str(folder.path), "wait_s": 20}
        status, told = await found.ask("POST", "/v1/versions", body)
        assert (status, told["version"], told["ready"], told["behind"]) == (200, "v1", ["a"], {})
        assert set(told["sync_s"]) == set(told["pause_s"]) == {"a"} and told["sync_s"]["a"] >= told["pause_s"]["a"] > 0
        _, pool = await found.ask("GET", "/v1/pool")
        assert pool["members"][0]["sync_s"] == told["sync_s"]["a"] and "stage" in pool["members"][0]["seconds"]
        spans = (await turn)["weight_versions"]
        assert [span["version"] for span in spans] == ["v0", "v1"] and spans[1]["end"] == 100
        await found.worker("b")
        await eventually(lambda: all(member.weights.version == "v1" for member in found.gateway.core.pool))
        missing = {"version": "v2", "folder": str(folder.path / "missing"), "wait_s": 0.2}
        _, failed = await found.ask("POST", "/v1/versions", missing)
        assert failed["ready"] == [] and "not a folder" in failed["behind"]["a"]

    tell(folder, story)


def test_a_group_becomes_a_batch_in_either_encoding(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        poll = asyncio.create_task(found.ask("GET", "/v1/batches/next?groups=1&wait_s=20"))
        for name in ("x", "y"):
            begun = {"id": name, "group": "g", "group_size": 2, "seed": 4}
            assert (await found.ask("POST", "/v1/trajectories", begun))[0] == 200
            await found.turn(PROMPT, name, max_tokens=3)
        assert (await found.ask("POST", "/v1/trajectories/x/finish", {"reward": 1}))[1]["turns"] == 1
        assert (await found.ask("POST", "/v1/trajectories/y/finish", {"reward": 0.5}))[0] == 200
        status, batch = await poll
        assert status == 200 and batch["batch"] == 1
        async with GatewayClient(found.url, TOKENS.trainer) as client:
            same = await client.next_batch(1, 0)
        assert msgspec.convert(batch, Batch) == same
        assert [found.reward for found in same.groups[0].trajectories] == [1.0, 0.5]
        assert same.groups[0].trajectories[0].token_ids == (*PROMPT, *scripted(PROMPT, 3))
        assert await found.ask("GET", "/v1/batches/next?groups=1&after=1&wait_s=0.1") == (204, b"")
        assert (await found.ask("POST", "/v1/trajectories/x/finish", {"reward": 0}))[0] == 409

    tell(folder, story)


def test_finishing_a_trajectory_ends_its_turns(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        engine = await found.worker("a", step_s=0.01)
        turn = asyncio.create_task(found.refused(PROMPT, "s", max_tokens=500))
        await eventually(lambda: engine.requests == 1)
        await found.ask("POST", "/v1/trajectories/s/finish", {"is_lost": True})
        assert await turn == 503
        await eventually(lambda: engine.requests == 0)

    tell(folder, story)


@pytest.mark.parametrize("body, status", [
    ({"reward": 1, "invalid_turns": 1 << 64}, 400),
    ({"reward": 1, "invalid_turns": -1}, 400),
    ({"reward": 1e308}, 400),
    ({"reward": 1}, 200),
])  # fmt: skip
@pytest.mark.parametrize("with_ledger", [True, False])
def test_an_invalid_finish_is_refused_and_a_valid_one_counts(
    folder: ModelFolder, tmp_path: Path, body: dict[str, Any], status: int, with_ledger: bool
) -> None:
    async def story(found: World) -> None:
        await begin(found, TOKENS.trainer, id="t", group="g")
        assert (await found.ask("POST", "/v1/trajectories/t/finish", body))[0] == status
        assert (await found.ask("POST", "/v1/trajectories/t/finish", {"reward": 1}))[0] == 200
        for _ in range(2):
            assert (await found.ask("GET", "/v1/batches/next?wait_s=5"))[0] == 200

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite") if with_ledger else None)


def test_what_an_agent_sends_with_begin_is_bounded(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        for body in (
            {"task": "x" * 5000},
            {"id": "i" * 257},
            {"group": "g" * 257},
            {"group_size": 1 << 40},
            {"seed": 1 << 63},
            {"secret": "short"},
            {"secret": "with spaces in it, long"},
            {"id": "run/0~1"},
        ):
            assert (await begin(found, **body))[0] == 400, body
        assert len(found.gateway.core.trajectories) == 0

    tell(folder, story)


def test_an_agent_acts_only_on_trajectories_that_it_began(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        status, mine = await begin(found, id="run/7/0", group="run/7")
        assert status == 200 and mine["session"].startswith("run/7/0.")
        turn = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
        as_agent = {"token": TOKENS.agent}
        for name in ("run/7/0", "run/7/0.0123456789abcdef0123"):
            status, reply = await found.ask("POST", "/inference/v1/generate", turn, session=name, **as_agent)
            assert status == 403 and "session" in reply["error"]["message"]
            path = f"/v1/trajectories/{name.replace('/', '%2F')}/finish"
            assert (await found.ask("POST", path, {"reward": 1e6}, **as_agent))[0] == 403
        session = found.gateway.core.trajectories.get("run/7/0")
        assert session is not None and not session.turns and session.finish is None
        assert (await begin(found, id="run/7/0", group="run/7"))[0] == 403, "its secret is not given to others"
        status, _ = await found.ask("POST", "/inference/v1/generate", turn, session=mine["session"], **as_agent)
        assert status == 200 and len(session.turns) == 1
        path = f"/v1/trajectories/{mine['session'].replace('/', '%2F')}/finish"
        status, reply = await found.ask("POST", path, {"reward": 0.5}, **as_agent)
        assert status == 200 and reply["id"] == "run/7/0" and session.finish is not None
        _, batch = await found.ask("GET", "/v1/batches/next?wait_s=5")
        [trajectory] = batch["groups"][0]["trajectories"]
        assert (trajectory["trajectory_id"], trajectory["reward"], trajectory["turns"]) == ("run/7/0", 0.5, 1)

    tell(folder, story)


def test_an_agent_cannot_take_an_id_before_its_owner_begins_it(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        turn = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
        assert (await found.ask("POST", "/inference/v1/generate", turn, session="run/8/0", token=TOKENS.agent))[
            0
        ] == 200
        status, mine = await begin(found, TOKENS.trainer, id="run/8/0", group="run/8")
        assert status == 200
        session = found.gateway.core.trajectories.get("run/8/0")
        assert session is not None and not session.turns and session.name == mine["session"]

    tell(folder, story)


def test_an_agent_that_sends_its_own_secret_may_begin_again(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        async with GatewayClient(found.url, TOKENS.agent) as client, GatewayClient(found.url, TOKENS.agent) as other:
            body = BeginBody(id="t", group="g")
            first = await client.begin(body)
            assert await client.begin(body) == first and client.session("t") == first.session
            with pytest.raises(Exception, match="begun before"):
                await other.begin(body)
            with pytest.raises(Exception, match="belongs to the agent"):
                await other.finish("t", FinishBody(reward=1))
            assert (await client.finish("t", FinishBody(reward=1))).id == "t"

    tell(folder, story, ledger=str(tmp_path / "ledger.sqlite"))


def test_a_batch_is_encoded_piece_by_piece_and_reads_the_same(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        for member in ("x", "y"):
            await begin(found, TOKENS.trainer, id=member, group="g", group_size=2)
            await found.turn(PROMPT, member, max_tokens=3)
            await found.ask("POST", f"/v1/trajectories/{member}/finish", {"reward": 1})
        whole = found.gateway.core.trajectories.batch(1, 0)
        _, as_json = await found.ask("GET", "/v1/batches/next?wait_s=5")
        assert as_json == msgspec.json.decode(msgspec.json.encode(whole))
        async with GatewayClient(found.url, TOKENS.trainer) as client:
            assert await client.next_batch(1, 0) == whole

    tell(folder, story)


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/v1/pool", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/models", 200),
        ("POST", "/v1/pool/a/drain", 200),
        ("POST", "/inference/v1/generate", 403),
        ("POST", CHAT, 403),
        ("POST", "/v1/trajectories", 403),
        ("POST", "/v1/trajectories/t/finish", 403),
        ("GET", "/v1/batches/next", 403),
        ("POST", "/v1/versions", 403),
        ("GET", CONNECT_PATH, 403),
    ],
)
def test_an_operator_may_read_the_pool_and_drain_workers(
    folder: ModelFolder, method: str, path: str, status: int
) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        body = {} if method == "POST" else None
        found_status, reply = await found.ask(method, path, body, token=TOKENS.operator)
        assert found_status == status, reply
        if status == 403:
            assert "operator" in reply["error"]["message"]

    tell(folder, story)


@pytest.mark.parametrize("token", [TOKENS.agent, TOKENS.worker, ""])
def test_only_trainers_and_operators_may_drain_workers(folder: ModelFolder, token: str) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        assert (await found.ask("POST", "/v1/pool/a/drain", {}, token=token))[0] == (403 if token else 401)
        assert (await found.ask("POST", "/v1/pool/a/drain", {}, token=TOKENS.trainer))[0] == 200

    tell(folder, story)
