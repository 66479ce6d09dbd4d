"""Two engines of two tensor-parallel ranks each: a pool per rank, and groups that move on both ranks or on none.

Every engine has a worker process per rank; rank r of the rollout engine joins the pool of rank r of serving. A group is
128 blocks of 32 tokens in 4 pages of each rank, and a pool has 12 groups. The stories follow one another.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.vllm.engines import CORES, ServingEngine, rollout_engine
from tests.vllm.test_lending import BUDGETS, is_as_served
from tests.vllm.test_pool import TURNS, PooledPair, burst, check_same, mapped_pages, processes_of

from rose.errors import Unavailable
from rose.vllm.plugin import POOL_VARIABLE
from rose.vllm.vllm_agent import VllmEngineClient, VllmLending

RANKS, POOL_MB, GROUP_PAGES = 2, 96, 4
TOKENS = 40  # of an answer: ranks on busy cores wait for each other several times in every step

pytestmark = pytest.mark.skipif(len(CORES) < RANKS, reason="every rank needs a core")


class ParallelPair(PooledPair):
    """Two engines of two ranks."""

    async def begin(self, model: Path) -> None:
        await self.serving.ready()
        self.expected = await burst(self.serving, tokens=TOKENS)
        device = f"cpu:{CORES[-RANKS]}-{CORES[-1]}"
        engine = replace(rollout_engine(model, max_sequences=TURNS, step_tokens=512), device=device)
        engine = replace(engine, tensor_parallel=RANKS)
        self.client = VllmEngineClient(VllmLending(engine, self.serving.url, "decode", BUDGETS))
        self._taking = asyncio.create_task(asyncio.sleep(0))
        await self.client.start()

    def pages_of_ranks(self, group: int) -> list[int]:
        """Return how many pages an engine has of each rank's pool, as the kernel tells it."""
        return list(Counter(pool for pool, _ in mapped_pages(group)).values())


@pytest.fixture(scope="module")
def pair(model_folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelPair]:
    runner, folder = asyncio.Runner(), tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POOL_VARIABLE, "auto")
        serving = ServingEngine(model_folders[1], folder / "log", kv_memory_mb=POOL_MB, ranks=RANKS)
        made = ParallelPair(runner, serving, None)  # type: ignore[arg-type]
        try:
            runner.run(made.begin(model_folders[0]))
            yield made
        finally:
            runner.run(made.close())
            serving.close()
            runner.close()


def test_every_rank_of_an_engine_takes_the_same_groups(pair: ParallelPair) -> None:
    async def story(pair: ParallelPair) -> None:
        await pair.teach()
        pair.undisturbed = await pair.rollouts(TOKENS)
        assert {reason for _, reason in pair.undisturbed} == {"length"}
        status = pair.worker.status()
        assert status.pages >= 2 * GROUP_PAGES
        assert pair.pages_of_ranks(pair.process.process_id) == [status.pages] * RANKS
        first, second = pair.pages_of_ranks(pair.serving.process.pid)
        assert first == second
        pair.check_kernel()

    pair.tell(story)  # type: ignore[arg-type]


def test_a_smaller_budget_takes_the_same_groups_from_every_rank(pair: ParallelPair) -> None:
    async def story(pair: ParallelPair) -> None:
        turns = asyncio.create_task(pair.rollouts(TOKENS))
        await pair.until(lambda status: status.running == TURNS)
        await pair.client.adopt(replace(pair.client.desired, memory_share=0.1))
        status = pair.worker.status()
        assert status.pages == 2 * GROUP_PAGES and status.evictions > 0
        assert pair.pages_of_ranks(pair.process.process_id) == [status.pages] * RANKS
        for (tokens, reason), (whole, _) in zip(await turns, pair.undisturbed, strict=True):
            assert tokens == (whole if reason == "length" else whole[: len(tokens)])
        await pair.client.adopt(replace(pair.client.desired, memory_share=1.0))

    pair.tell(story)  # type: ignore[arg-type]


def test_users_get_right_answers_while_pages_move_on_both_ranks(pair: ParallelPair) -> None:
    async def story(pair: ParallelPair) -> None:
        turns = asyncio.create_task(pair.rollouts(TOKENS))
        await pair.until(lambda status: status.running > 0)
        known, new = (burst(pair.serving, first, TOKENS) for first in (0, 100))
        answers, _ = await asyncio.gather(known, new)  # as many at once as serving runs
        check_same(answers, pair.expected)
        pair.check_kernel()
        for (tokens, reason), (whole, _) in zip(await turns, pair.undisturbed, strict=True):
            assert tokens == whole[: len(tokens)] and reason in ("length", "abort")
        first, second = pair.pages_of_ranks(pair.serving.process.pid)
        assert first == second

    pair.tell(story)  # type: ignore[arg-type]


def test_new_weights_reach_every_rank(pair: ParallelPair, model_folders: list[Path]) -> None:
    async def story(pair: ParallelPair) -> None:
        for version, folder in (("second", model_folders[1]), ("first", model_folders[0])):
            await pair.client.stage(version, str(folder))
            await pair.client.commit(version)
            rollout = await pair.rollout(pair.request(max_tokens=40))
            assert set(rollout[2]) == {version}
            if version == "second":
                await is_as_served(pair, rollout)

    pair.tell(story)  # type: ignore[arg-type]


def test_a_killed_rank_gives_the_pages_of_all_ranks_back(pair: ParallelPair) -> None:
    async def story(pair: ParallelPair) -> None:
        turns = asyncio.create_task(pair.rollouts(TOKENS))
        await pair.until(lambda status: status.running > 0 and status.pages >= 2 * GROUP_PAGES)
        engine = pair.process
        workers = [process for process, pages in processes_of(engine.process_id).items() if pages]
        assert len(workers) == RANKS
        os.kill(workers[1], signal.SIGKILL)
        check_same(await burst(pair.serving, tokens=TOKENS), pair.expected)
        with pytest.raises(Unavailable):
            await turns
        while pair.client.restarts == 0:
            await asyncio.sleep(0.1)
        assert mapped_pages(engine.process_id) == set()
        assert await pair.rollouts(TOKENS) == pair.undisturbed
        pair.check_kernel()

    pair.tell(story)  # type: ignore[arg-type]


def test_serving_that_loses_a_rank_ends_the_rollout_engine_too(pair: ParallelPair) -> None:
    async def story(pair: ParallelPair) -> None:
        engine, serving = pair.process, pair.serving.process
        workers = [process for process, pages in processes_of(serving.pid).items() if pages]
        os.kill(workers[0], signal.SIGKILL)
        while serving.poll() is None or mapped_pages(engine.process_id):
            await asyncio.sleep(0.1)
        assert pair.client.trouble is not None

    pair.tell(story)  # type: ignore[arg-type]
