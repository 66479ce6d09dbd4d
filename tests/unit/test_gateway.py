"""Gateway and agents together, over real connections, with scripted engines: what a process would make slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.unit.rollout_world import TOKENS, World, eventually, world

from rose.errors import ContextTooLong, Unavailable
from rose.models.folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.rollout.client import GatewayClient
from rose.rollout.messages import CONNECT_PATH, Join, decode_to_agent, encode
from rose.rollout.trajectories import Batch

Story = Callable[[World], Awaitable[None]]
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0))


def tell(folder: ModelFolder, story: Story, **changes: Any) -> None:
    async def whole() -> None:
        async with world(folder, **changes) as found:
            await story(found)

    asyncio.run(whole())


def scripted(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append((ids[-1] + len(ids)) % 264)
    return ids[len(prompt) :]


def test_turns_run_and_are_counted(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        answers = await asyncio.gather(*(found.turn([n], f"s{n}", max_tokens=20) for n in range(30)))
        assert [answer["token_ids"] for answer in answers] == [scripted([n], 20) for n in range(30)]
        assert all(answer["finish_reason"] == "length" for answer in answers)
        assert answers[0]["weight_versions"] == [{"version": "v0", "start": 0, "end": 20}]
        counts = found.gateway.scheduler.counts
        assert (counts.begun, counts.ended, counts.placed) == (30, 30, 30)
        _, metrics = await found.ask("GET", "/metrics")
        assert b'rose_gateway_turns_total{what="ended"} 30.0' in metrics

    tell(folder, story)


def test_both_routes_without_a_session_are_a_devices(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        assert (await found.turn(PROMPT, max_tokens=5))["token_ids"] == scripted(PROMPT, 5)
        body = {"prompt": PROMPT, "max_tokens": 5, "return_token_ids": True, "n": 2}
        status, reply = await found.ask("POST", "/v1/completions", body)
        assert status == 200 and [c["token_ids"] for c in reply["choices"]] == [scripted(PROMPT, 5)] * 2
        assert len(found.gateway.trajectories) == 0

    tell(folder, story)


@pytest.mark.parametrize("how", ["evict", "stop", "die", "refuse", "silence"])
def test_a_turn_goes_on_elsewhere(folder: ModelFolder, how: str) -> None:
    async def story(found: World) -> None:
        first = await found.worker("a", step_s=0.005)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=200))
        await eventually(lambda: found.gateway.scheduler.counts.tokens > 5)
        second = await found.worker("b")
        member = found.gateway.pool.get("a")
        assert member is not None
        if how == "evict":
            found.gateway.scheduler.drain(member, found.gateway.now_s())
        elif how == "stop":
            await found.stop("a")
        elif how == "die":
            first.refusal = Unavailable("it is being restarted")
            first.die("killed")
        elif how == "refuse":
            first.refusal = Unavailable("the owner wants it back")
            await first.ask_evict_all()
        else:
            member.lease_until_s = 0.0
            found.gateway.tick(found.gateway.now_s())
        answer = await turn
        assert answer["token_ids"] == scripted(PROMPT, 200) and len(answer["logprobs"]["content"]) == 200
        assert second.facts.generated_tokens < 200, "it did not begin again"
        assert found.gateway.scheduler.counts.ended == 1
        await eventually(lambda: first.requests == 0)

    tell(folder, story)


def test_what_no_engine_would_take_is_the_clients_fault(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        engine = await found.worker("a")
        engine.refusal = ContextTooLong("much too long")
        assert await found.refused(PROMPT) == 400
        engine.refusal = Unavailable("not now", retry_after_s=0.1)
        waiting = asyncio.create_task(found.turn(PROMPT, max_tokens=3))
        await asyncio.sleep(0.05)
        engine.refusal = None
        assert (await waiting)["token_ids"] == scripted(PROMPT, 3)

    tell(folder, story)


def test_a_repeated_request_is_answered_while_it_runs_and_after(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.002)
        both = await asyncio.gather(*(found.turn(PROMPT, "s", max_tokens=40) for _ in range(3)))
        after = await found.turn(PROMPT, "s", max_tokens=40)
        assert [answer["token_ids"] for answer in (*both, after)] == [scripted(PROMPT, 40)] * 4
        assert found.gateway.scheduler.counts.begun == 1
        await found.turn(PROMPT, "s", max_tokens=40, seed=2)
        assert found.gateway.scheduler.counts.begun == 2

    tell(folder, story)


def test_a_turn_that_was_given_up_goes_on_when_it_is_asked_again(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        turn = asyncio.create_task(found.refused(PROMPT, "s", max_tokens=100))
        await eventually(lambda: found.gateway.scheduler.counts.tokens > 5)
        await found.stop("a")
        assert await turn == 503
        second = await found.worker("b")
        assert (await found.turn(PROMPT, "s", max_tokens=100))["token_ids"] == scripted(PROMPT, 100)
        assert second.facts.generated_tokens < 100

    tell(folder, story, wait_s=0.2)


def test_a_trajectory_stays_where_its_prefix_is(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        engines = [await found.worker("a"), await found.worker("b")]

        async def play(name: str) -> None:
            prompt = [len(name)]
            for _ in range(5):
                prompt += (await found.turn(prompt, name, max_tokens=4))["token_ids"] + [9]

        await asyncio.gather(*(play(f"s{n}") for n in range(8)))
        ended = [member.turns_ended for member in found.gateway.pool]
        assert sum(ended) == 40
        if not found.gateway.scheduler.counts.stalled:  # on a machine that stops for half a second turns do move
            assert all(count % 5 == 0 for count in ended)
        assert all(engine.facts.generated_tokens for engine in engines)

    tell(folder, story, router="sticky")


def test_new_weights_reach_all_members_and_late_comers(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=100))
        await eventually(lambda: found.gateway.scheduler.counts.tokens > 5)
        body = {"version": "v1", "folder": str(folder.path), "wait_s": 20}
        status, told = await found.ask("POST", "/v1/versions", body)
        assert (status, told["version"], told["ready"], told["behind"]) == (200, "v1", ["a"], {})
        assert set(told["sync_s"]) == set(told["pause_s"]) == {"a"} and told["sync_s"]["a"] >= told["pause_s"]["a"] > 0
        _, pool = await found.ask("GET", "/v1/pool")
        assert pool["members"][0]["sync_s"] == told["sync_s"]["a"] and "stage" in pool["members"][0]["seconds"]
        spans = (await turn)["weight_versions"]
        assert [span["version"] for span in spans] == ["v0", "v1"] and spans[1]["end"] == 100
        await found.worker("b")
        await eventually(lambda: all(member.version == "v1" for member in found.gateway.pool))
        missing = {"version": "v2", "folder": str(folder.path / "missing"), "wait_s": 0.2}
        _, failed = await found.ask("POST", "/v1/versions", missing)
        assert failed["ready"] == [] and "not a folder" in failed["behind"]["a"]

    tell(folder, story)


def test_a_conversation_with_a_stop_string(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")

        async def say(messages: list[Any], **more: Any) -> Any:
            body = {"messages": messages, "return_token_ids": True, "max_tokens": 30} | more
            status, reply = await found.ask("POST", "/v1/chat/completions", body, session="talk")
            assert status == 200, reply
            return reply

        opening = [{"role": "user", "content": "hello"}]
        free = await say(opening)
        text = free["choices"][0]["message"]["content"]
        cut = await say(opening, stop=text[2:4])
        assert cut["choices"][0]["message"]["content"] == text[:2] and cut["choices"][0]["finish_reason"] == "stop"
        held = [*cut["prompt_token_ids"], *cut["choices"][0]["token_ids"]]
        assert len(held) < len(free["prompt_token_ids"]) + 30
        more = [*opening, cut["choices"][0]["message"], {"role": "user", "content": "and?"}]
        assert (await say(more))["prompt_token_ids"][: len(held)] == held
        session = found.gateway.trajectories.get("talk")
        assert session is not None and len(session.turns) == 3 and not any(turn.is_running for turn in session.turns)

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


@pytest.mark.parametrize(
    "frame, words",
    [
        (b"nonsense", "unreadable"),
        (encode([Join("n", "dedicated", "other model", "0", 1, 1, 1)]), "other model"),
        (encode([]), None),
    ],
)
def test_a_worker_that_makes_no_sense_is_sent_away(folder: ModelFolder, frame: bytes, words: str | None) -> None:
    async def story(found: World) -> None:
        headers = {"Authorization": f"Bearer {TOKENS.worker}"}
        async with found.http.ws_connect(found.url + CONNECT_PATH, headers=headers) as connection:
            await connection.send_bytes(frame)
            if words is None:
                await connection.close()
            else:
                said = str([decode_to_agent(m.data) async for m in connection if m.type is aiohttp.WSMsgType.BINARY])
                assert "Leave" in said and words in said
        assert len(found.gateway.pool) == 0

    tell(folder, story)


def test_a_second_worker_of_the_same_name_waits_for_the_first_to_go(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        first = found.gateway.pool.get("a")
        await found.worker("a2", name="a")
        await asyncio.sleep(0.3)
        assert found.gateway.pool.get("a") is first
        await found.stop("a")
        await eventually(lambda: found.gateway.pool.get("a") not in (None, first))

    tell(folder, story)


def test_an_agent_that_is_cancelled_just_as_it_is_welcomed_ends(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = aiohttp.ClientWebSocketResponse.receive

    async def story(found: World) -> None:
        async def cancelled_meanwhile(self: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage:
            message = await receive(self)
            monkeypatch.undo()
            found.agent("a").cancel()
            return message

        monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "receive", cancelled_meanwhile)
        await found.worker("a", name="b")
        await eventually(found.agent("a").done)

    tell(folder, story)


def test_a_worker_with_a_wrong_token_never_joins(folder: ModelFolder, caplog: pytest.LogCaptureFixture) -> None:
    async def story(found: World) -> None:
        await found.worker("a", token="wrong-token")
        await eventually(lambda: "ROSE_WORKER_TOKEN" in caplog.text)
        assert len(found.gateway.pool) == 0

    tell(folder, story)


def test_idle_trajectories_are_forgotten(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        await found.turn(PROMPT, "s", max_tokens=2)
        found.gateway.tick(found.gateway.now_s() + 2.0)
        assert len(found.gateway.trajectories) == 0

    tell(folder, story, idle_s=1.0)
