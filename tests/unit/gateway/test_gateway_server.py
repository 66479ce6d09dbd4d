"""A gateway and its agents over real connections, with scripted engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.rollout_world import PROMPT, World, eventually, scripted, tell

from rose.errors import ContextTooLong, Unavailable
from rose.models.model_folder import ModelFolder


def test_turns_run_and_are_counted(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        answers = await asyncio.gather(*(found.turn([n], f"s{n}", max_tokens=20) for n in range(30)))
        assert [answer["token_ids"] for answer in answers] == [scripted([n], 20) for n in range(30)]
        assert all(answer["finish_reason"] == "length" for answer in answers)
        assert answers[0]["weight_versions"] == [{"version": "v0", "start": 0, "end": 20}]
        counts = found.gateway.core.scheduler.counts
        assert (counts.begun, counts.ended, counts.placed) == (30, 30, 30)
        _, metrics = await found.ask("GET", "/metrics")
        assert b'rose_gateway_turns_total{what="ended"} 30.0' in metrics

    tell(folder, story)


@pytest.mark.parametrize("how", ["evict", "stop", "die", "refuse", "silence"])
def test_a_turn_continues_on_another_worker(folder: ModelFolder, how: str) -> None:
    async def story(found: World) -> None:
        first = await found.worker("a", step_s=0.005)
        turn = asyncio.create_task(found.turn(PROMPT, "s", max_tokens=200))
        await eventually(lambda: found.gateway.core.scheduler.counts.tokens > 5)
        second = await found.worker("b")
        member = found.gateway.core.pool.get("a")
        assert member is not None
        if how == "evict":
            found.gateway.core.scheduler.drain(member, found.gateway.now_s())
        elif how == "stop":
            await found.stop("a")
        elif how == "die":
            first.refusal = Unavailable("it is being restarted")
            first.die("killed")
        elif how == "refuse":
            first.refusal = Unavailable("the owner wants it back")
            await first.evict_all()
        else:
            member.lease.until_s = 0.0
            found.gateway.core.tick(found.gateway.now_s())
        answer = await turn
        assert answer["token_ids"] == scripted(PROMPT, 200) and len(answer["logprobs"]["content"]) == 200
        assert second.facts.generated_tokens < 200, "it did not begin again"
        assert found.gateway.core.scheduler.counts.ended == 1
        await eventually(lambda: first.requests == 0)

    tell(folder, story)


def test_a_request_that_no_engine_takes_is_the_clients_fault(folder: ModelFolder) -> None:
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
        assert found.gateway.core.scheduler.counts.begun == 1
        await found.turn(PROMPT, "s", max_tokens=40, seed=2)
        assert found.gateway.core.scheduler.counts.begun == 2

    tell(folder, story)


def test_a_cancelled_turn_continues_when_it_is_requested_again(folder: ModelFolder) -> None:
    async def story(found: World) -> None:
        await found.worker("a", step_s=0.005)
        turn = asyncio.create_task(found.refused(PROMPT, "s", max_tokens=100))
        await eventually(lambda: found.gateway.core.scheduler.counts.tokens > 5)
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
        ended = [member.placement.turns_ended for member in found.gateway.core.pool]
        assert sum(ended) == 40
        if not found.gateway.core.scheduler.counts.stalled:  # on a machine that stops for half a second turns do move
            assert all(count % 5 == 0 for count in ended)
        assert all(engine.facts.generated_tokens for engine in engines)

    tell(folder, story, router="paper")


def test_idle_trajectories_are_forgotten(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(found: World) -> None:
        await found.worker("a")
        await found.turn(PROMPT, "s", max_tokens=2)
        found.gateway.core.tick(found.gateway.now_s() + 2.0)
        assert len(found.gateway.core.trajectories) == 0

    tell(folder, story, idle_s=1.0)
