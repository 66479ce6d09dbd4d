"""Two vLLM servers on one pool of KV pages: pages go both ways, and no fault of the rollout engine keeps serving's.

Both models have one shape: a group is 64 blocks of 32 tokens in 4 pages, and the pool has 12 groups. What the kernel
says is in /proc/PID/maps: no page of the pool may ever be mapped in two processes. The stories follow one another.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.vllm import forced_async
from tests.vllm.engines import ServingEngine, asynchronous, rollout_engine
from tests.vllm.test_lending import BUDGETS, WAIT_S, Pair

from rose.engines.base import Request, Sampling
from rose.errors import Unavailable
from rose.vllm.plugin import POOL_VARIABLE
from rose.vllm.vllm_agent import VllmEngineClient, VllmLending

POOL_MB, GROUPS, GROUP_PAGES = 96, 12, 4
BURST, PROMPT_TOKENS, ANSWER_TOKENS = 12, 800, 200  # 12 requests of 32 blocks: half of the pool
TURNS, TURN_PROMPT, TURN_TOKENS = 16, 800, 100  # of rollouts, 29 blocks each: more than the budget of 32 pages


def burst_prompt(number: int) -> list[int]:
    return [(11 * number + 5 * place) % 200 + 5 for place in range(PROMPT_TOKENS)]


async def burst(
    serving: ServingEngine, first: int = 0, tokens: int = ANSWER_TOKENS
) -> list[tuple[list[int], list[float]]]:
    """Ask for half of the pool at once."""
    return await asyncio.gather(*(serving.answer(burst_prompt(first + number), tokens) for number in range(BURST)))


def check_same(answers: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    """Check tokens, and log-probabilities up to rounding: a prompt that is cut elsewhere is rounded differently."""
    for (tokens, logprobs), (others, likely) in zip(answers, expected, strict=True):
        assert tokens == others
        assert logprobs == pytest.approx(likely, abs=1e-4)


class PooledPair(Pair):
    """A serving engine with a pool, and a rollout engine that joins it."""

    expected: list[tuple[list[int], list[float]]]  # of serving without a pool
    undisturbed: list[tuple[list[int], str | None]]  # turns that nothing evicted

    async def begin(self, model: Path) -> None:
        await self.serving.ready()
        engine = rollout_engine(model, max_sequences=TURNS, step_tokens=512)
        self.client = VllmEngineClient(VllmLending(engine, self.serving.url, "decode", BUDGETS))
        self._taking = asyncio.create_task(asyncio.sleep(0))
        await self.client.start()

    async def rollouts(self, tokens: int = TURN_TOKENS) -> list[tuple[list[int], str | None]]:
        """Return the tokens of sixteen turns, and how each ended."""
        self.numbers += TURNS
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        prompts = [tuple((13 * turn + 3 * place) % 200 + 5 for place in range(TURN_PROMPT)) for turn in range(TURNS)]
        turns = [Request(f"turn-{self.numbers + turn}", prompt, sampling) for turn, prompt in enumerate(prompts)]
        ended = await asyncio.gather(*(self.rollout(turn) for turn in turns))
        return [(one[0], one[3]) for one in ended]

    def check_kernel(self) -> tuple[int, int]:
        """Return the pages that each engine has mapped; no page twice."""
        serving, rollouts = (mapped_pages(group) for group in (self.serving.process.pid, self.process.process_id))
        assert not serving & rollouts, "a page of the pool is mapped in two processes"
        return len(serving), len(rollouts)

    def check_kernel_of_serving(self) -> int:
        return len(mapped_pages(self.serving.process.pid))


def mapped_pages(group: int) -> set[tuple[int, int]]:
    """Return the pages that the processes of a group can touch, each with the pool that it is of."""
    return set().union(*processes_of(group).values())


def processes_of(group: int) -> dict[int, set[tuple[int, int]]]:
    """Return the pages of every process of a group, as the kernel tells it. A pool is a memfd."""
    found: dict[int, set[tuple[int, int]]] = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[2]) != group:
                continue
            lines = (path / "maps").read_text().splitlines()
        except OSError:
            continue
        pages = found[int(path.name)] = set()
        for line in lines:
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and "memfd:rose" in parts[5] and parts[1].startswith("r"):
                begin, end = (int(address, 16) for address in parts[0].split("-"))
                first, pool = int(parts[2], 16) >> 21, int(parts[4])
                pages.update((pool, page) for page in range(first, first + (end - begin >> 21)))
    return found


@pytest.fixture(scope="module")
def pair(model_folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PooledPair]:
    runner, folder = asyncio.Runner(), tmp_path_factory.mktemp("pool")
    plain = ServingEngine(model_folders[1], folder / "plain", "", kv_memory_mb=POOL_MB)
    try:
        runner.run(plain.ready())
        expected = runner.run(burst(plain))
    finally:
        plain.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(POOL_VARIABLE, "auto")
        made = PooledPair(runner, ServingEngine(model_folders[1], folder / "log", kv_memory_mb=POOL_MB), None)  # type: ignore[arg-type]
        made.expected = expected
        try:
            runner.run(made.begin(model_folders[0]))
            yield made
        finally:
            runner.run(made.close())
            made.serving.close()
            runner.close()


def test_serving_gives_back_what_it_only_caches_when_rollouts_want_it(pair: PooledPair) -> None:
    async def story(pair: PooledPair) -> None:
        await pair.teach()
        for number in range(BURST):
            await pair.serving.answer(burst_prompt(100 + number), 2)
        held = pair.check_kernel()[0]
        assert held >= 5 * GROUP_PAGES, "the prompts of a whole pool are cached"
        pair.undisturbed = await pair.rollouts()
        assert {reason for _, reason in pair.undisturbed} == {"length"}
        serving, rollouts = pair.check_kernel()
        assert serving < held and rollouts >= 6 * GROUP_PAGES
        assert await pair.serving.metric("vllm:kv_cache_usage_perc") == 0.0, "held blocks are not used ones"

    pair.tell(story)  # type: ignore[arg-type]


def test_a_smaller_budget_moves_the_turns_that_fit_together(pair: PooledPair) -> None:
    async def story(pair: PooledPair) -> None:
        turns = asyncio.create_task(pair.rollouts())
        await pair.until(lambda status: status.running == TURNS)
        await pair.client.adopt(replace(pair.client.desired, memory_share=0.25))
        status = pair.worker.status()
        assert status.pages == (GROUPS // 4 + 1) * GROUP_PAGES == pair.check_kernel()[1]
        assert status.moved_blocks > 0 and 0 < status.evictions < TURNS
        ended = await turns
        assert sum(reason == "abort" for _, reason in ended) == status.evictions
        for (tokens, reason), (whole, _) in zip(ended, pair.undisturbed, strict=True):
            assert tokens == (whole if reason == "length" else whole[: len(tokens)])
        await pair.client.adopt(replace(pair.client.desired, memory_share=1.0))

    pair.tell(story)  # type: ignore[arg-type]


def test_a_burst_of_users_gets_the_pages_of_rollouts_and_loses_nothing(pair: PooledPair) -> None:
    async def story(pair: PooledPair) -> None:
        await pair.until(lambda status: status.pages_max >= 7 * GROUP_PAGES)
        turns = asyncio.create_task(pair.rollouts())
        await pair.until(lambda status: status.running + status.waiting == TURNS and status.pages >= 6 * GROUP_PAGES)
        before = pair.check_kernel()
        answers = await burst(pair.serving)
        after = pair.check_kernel()
        check_same(answers, pair.expected)
        assert await pair.serving.metric("vllm:num_preemptions_total") == 0.0
        assert after[0] > before[0] and after[1] < before[1], (before, after)
        for (tokens, reason), (whole, _) in zip(await turns, pair.undisturbed, strict=True):
            assert tokens == whole[: len(tokens)]
            assert reason in ("length", "abort") and (reason == "abort" or len(tokens) == TURN_TOKENS)

    pair.tell(story)  # type: ignore[arg-type]


def test_a_parked_engine_keeps_only_the_null_group(pair: PooledPair) -> None:
    async def story(pair: PooledPair) -> None:
        await pair.client.set_wanted(False)
        status = pair.client.admin_status()
        assert (status.model, status.rollout_pages, status.pages) == ("parked", GROUP_PAGES, GROUPS * GROUP_PAGES)
        assert pair.check_kernel()[1] == GROUP_PAGES
        await pair.client.set_wanted(True)
        assert pair.client.admin_status().model == "resident"

    pair.tell(story)  # type: ignore[arg-type]


def test_asynchronous_engines_follow_serving_to_its_next_pool(
    pair: PooledPair, model_folders: list[Path], tmp_path: Path
) -> None:
    async def story(pair: PooledPair) -> None:
        port, before, lending = pair.serving.port, pair.process.process_id, pair.client.lending
        forced_async.install(plugins := tmp_path / "plugins")
        pair.client.lending = replace(lending, engine=asynchronous(lending.engine, plugins))
        pair.serving.kill()
        pair.serving = ServingEngine(
            model_folders[1], tmp_path / "log", "AsyncServingScheduler", port, plugins, kv_memory_mb=POOL_MB
        )
        await pair.serving.ready()
        while pair.client._engine is None or pair.process.process_id == before:
            await asyncio.sleep(0.1)
        assert mapped_pages(before) == set()
        await pair.teach()
        assert await pair.rollouts() == pair.undisturbed
        pair.check_kernel()

    pair.tell(story)  # type: ignore[arg-type]


def test_a_stopped_rollout_engine_is_ended_and_serving_gets_its_pages(pair: PooledPair) -> None:
    async def story(pair: PooledPair) -> None:
        turns = asyncio.create_task(pair.rollouts())
        await pair.until(lambda status: status.running + status.waiting == TURNS and status.pages >= 6 * GROUP_PAGES)
        engine = pair.process
        os.killpg(engine.process_id, signal.SIGSTOP)

        async def users(first: int) -> None:
            while engine.is_running:  # until the agent has ended it
                answers = await burst(pair.serving, first)
                if first == 0:
                    check_same(answers, pair.expected)

        await asyncio.gather(*(users(first) for first in (0, 200, 300)))
        assert pair.check_kernel_of_serving() >= GROUPS // 2 * GROUP_PAGES
        with pytest.raises(Unavailable):
            await turns

    pair.tell(story)  # type: ignore[arg-type]


def test_a_server_without_our_scheduler_is_refused_on_a_pool(
    model_folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POOL_VARIABLE, "auto")
    refused = ServingEngine(model_folders[1], tmp_path / "log", scheduler="")
    try:
        assert refused.process.wait(WAIT_S * 2) != 0
    finally:
        refused.kill()
    assert "does not run one of ROSE's schedulers" in (tmp_path / "log").read_text()
