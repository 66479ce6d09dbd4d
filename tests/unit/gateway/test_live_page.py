"""The live page: its headers, its events, and what it shows of trajectories."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from tests.unit.hostile_worker import begin
from tests.unit.rollout_world import LENDING, TOKENS, World, eventually, tell

from rose.core.history import ServingTimes
from rose.gateway import live_page
from rose.models.model_folder import ModelFolder

PAGE_BYTES_MAX = 300_000


def users_of(world: World, name: str) -> int:
    worker = world.gateway.core.pool.get(name)
    return worker.heartbeat.serving.requests if worker is not None and worker.heartbeat.serving is not None else 0


async def read_events(world: World, count: int, token: str = TOKENS.operator) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"}
    found: list[dict[str, Any]] = []
    async with world.http.get(f"{world.url}/ui/events", headers=headers) as reply:
        assert reply.status == 200 and reply.content_type == "text/event-stream"
        async for line in reply.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
            if len(found) == count:
                return found
    raise AssertionError("the stream ended")


def test_the_page_is_public_small_and_allows_only_itself(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        async with world.http.get(f"{world.url}/ui") as reply:
            body, headers = await reply.read(), reply.headers
        assert reply.status == 200 and len(body) < PAGE_BYTES_MAX
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
        text = body.decode()
        assert not re.search(r"(src|href)=\"(?!data:)", text) and "innerHTML" not in text and "/* s" not in text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)

    tell(folder, story)


def test_nothing_private_without_the_right_token(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        for path in ("/ui/events", "/ui/trajectories", "/ui/trajectories/x"):
            for token, status in (("", 401), (TOKENS.agent, 403), (TOKENS.worker, 403)):
                assert (await world.ask("GET", path, token=token))[0] == status, path

    tell(folder, story)


def test_events_have_all_workers_first_and_then_only_what_changed(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        await world.worker("a", labels={"rack": "a3"})
        await world.worker("b")
        engine = await world.worker("c", kind="borrowed")
        await eventually(lambda: len(world.gateway.core.pool) == 3)
        times = ServingTimes(12, 0.1, 0.2, 0.01, 0.02, 0.0, 0.0, 0.0, 0.0)
        engine.lend(serving=times, ttft_budget_s=0.5, breaches={"ttft": 1, "tpot": 2, "ambiguous": 3}, breaker_trips=4)
        await eventually(lambda: users_of(world, "c") == 12)
        reading = asyncio.create_task(read_events(world, 2))
        await eventually(lambda: world.gateway.feed.pages == 1)
        body = {"action": "pause", "workers": ["b"]}
        assert (await world.ask("POST", "/v1/pool/orders", body, token=TOKENS.operator))[0] == 200
        first, second = await reading
        rows = {row[0]: dict(zip(first["columns"], row)) for row in first["rows"]}
        assert first["is_full"] and set(rows) == {"a", "b", "c"} and rows["a"]["labels"] == "rack=a3"
        lent = rows["c"]
        assert (lent["requests"], lent["ttft_p99_s"], lent["ttft_budget_s"]) == (12, 0.2, 0.5)
        assert (lent["counted"], lent["ambiguous"], lent["breaker_trips"]) == (3, 3, 4)
        changed = {row[0]: dict(zip(first["columns"], row)) for row in second["rows"]}
        assert not second["is_full"] and changed["b"]["state"] == "paused" and "a" not in changed
        assert second["pool"]["orders"][-1]["target"] == "b"
        await eventually(lambda: world.gateway.feed.pages == 0)

    tell(folder, story)


def test_too_many_pages_are_refused(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "PAGES_MAX", 0)

    async def story(world: World) -> None:
        status, reply = await world.ask("GET", "/ui/events", token=TOKENS.operator)
        assert status == 503 and reply["error"]["code"] == "too_many_pages"

    tell(folder, story)


async def finished(world: World, name: str, reward: float) -> None:
    status, reply = await begin(world, id=name, group="g", group_size=2, task="cross")
    assert status == 200
    ids = [1, 2, 3]
    for _ in range(2):
        turn = await world.turn(ids, reply["session"], max_tokens=4)
        ids = [*ids, *turn["token_ids"], 7, 8]
    status, _ = await world.ask("POST", f"/v1/trajectories/{name}/finish", {"reward": reward})
    assert status == 200


def test_a_trajectory_shows_turns_and_then_only_its_tokens(folder: ModelFolder) -> None:
    async def story(world: World) -> None:
        await world.worker("a")
        await finished(world, "t1", 0.5)
        _, found = await world.ask("GET", "/ui/trajectories/t1", token=TOKENS.operator)
        assert [turn["workers"] for turn in found["turns"]] == [["a"], ["a"]] and found["summary"]["reward"] == 0.5
        assert [turn["parent"] for turn in found["turns"]] == [None, 0]
        assert [(one["version"] != "", one["tokens"]) for one in found["turns"][1]["segments"]] == [
            (False, 2),
            (True, 4),
        ]
        await finished(world, "t2", 1.0)  # the group is complete
        _, listed = await world.ask("GET", "/ui/trajectories", token=TOKENS.operator)
        assert [(row["id"], row["turns"], row["tokens"]) for row in listed["trajectories"]] == [
            ("t2", 2, 8),
            ("t1", 2, 8),
        ]
        _, found = await world.ask("GET", "/ui/trajectories/t1", token=TOKENS.operator)
        [turn] = found["turns"]
        assert [one["tokens"] for one in turn["segments"]] == [3, 4, 2, 4] and turn["workers"] == []
        assert (await world.ask("GET", "/ui/trajectories/none", token=TOKENS.operator))[0] == 404

    tell(folder, story)


def test_long_trajectories_are_cut(folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "TOKENS_SHOWN", 5)

    async def story(world: World) -> None:
        await world.worker("a")
        await finished(world, "t1", 0.5)
        assert (await world.ask("GET", "/ui/trajectories/t1", token=TOKENS.operator))[1]["is_cut"]

    tell(folder, story)


def test_a_status_without_requests_reports_no_times() -> None:
    from rose.worker.heartbeats import serving_report

    report = serving_report(LENDING, float("nan"))
    assert report.requests == 0 and report.ttft_p99_s is None and report.lent_share is None
