"""Two SGLang servers on one core: rollouts run in what serving leaves, and serving outlives what happens to them.

The rollout engine is kept by an engine client, as `rose lend sglang` does it, and gets its weights from a relay. The
serving engine serves the second model, so that it can be asked what rollouts must say after a swap to it. The stories
follow one another; the last two kill an engine each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from tests.sglang.engines import SglangServing, install_plugin, rollout_engine
from tests.vllm.engines import cpu_s
from tests.vllm.test_lending import BUDGETS, PROMPT, TURN, Pair, Trainer, is_as_served

from rose.errors import RequestRefused, Unavailable
from rose.observe.metrics import Metrics
from rose.sglang.sglang_agent import SglangEngineClient
from rose.sglang.sglang_engine import SglangEngine
from rose.vllm.vllm_agent import VllmLending
from rose.weights.keys import SECRET
from rose.weights.weight_buffers import FOLDER_VARIABLE
from rose.weights.weight_metrics import ReceiveMetrics
from rose.worker.weight_updater import WeightUpdater


class SglangPair(Pair):
    """A serving engine, and beside it a client that keeps a rollout engine."""

    taught = 0

    async def start(self, model: Path) -> None:
        await self.serving.ready()
        self.client = SglangEngineClient(VllmLending(rollout_engine(model), self.serving.url, "idle", BUDGETS))
        await self.client.start()
        self.intake = WeightUpdater(self.client, ReceiveMetrics(Metrics(process_facts=False)))
        self.intake.on_ready = self.heard.append
        self._taking = asyncio.create_task(self.intake.run())

    async def until_made(self, tokens: int) -> None:
        assert isinstance(self.worker, SglangEngine)
        while f"turn-{self.numbers}" not in self.worker._names:
            await asyncio.sleep(0.01)
        name = self.worker._inner_name(f"turn-{self.numbers}")
        await self.until(lambda status: status.live.get(name, (0, 0))[1] >= tokens)

    async def teach(self) -> None:
        """Serve new prompts of several lengths: SGLang computes one token of a prompt that it has served before."""
        for number in range(12):
            self.taught += 2
            prompts = ([(7 * place + self.taught + k) % 250 for place in range(40 * (1 + number % 4))] for k in (0, 1))
            await asyncio.gather(*(self.serving.answer(prompt, 12) for prompt in prompts))


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_plugin(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="module")
def pair(model_folders: list[Path], plugins: Path, tmp_path_factory: pytest.TempPathFactory):
    runner, folder = asyncio.Runner(), tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "a secret that both sides know")
        patch.setenv(FOLDER_VARIABLE, str(folder))
        trainer = Trainer(model_folders, folder / "relay")
        made = SglangPair(runner, SglangServing(model_folders[1], folder / "log", plugins), trainer)
        try:
            runner.run(made.start(model_folders[0]))
            yield made
        finally:
            runner.run(made.close())
            made.serving.close()
            trainer.close()
            runner.close()


def test_nothing_is_lent_until_the_steps_of_serving_are_learnt(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        turn = asyncio.create_task(pair.rollout(pair.request()))
        status = await pair.until(lambda status: status.waiting == 1 and "learning" in status.why)
        assert (status.steps, status.state, status.gate_open) == (0, "parked", False)
        await pair.teach()
        tokens, logprobs, _, reason = await turn
        assert (len(tokens), len(logprobs), reason) == (24, 24, "length")
        status = pair.worker.status()
        assert (status.lent.missing, pair.client.trouble) == ("", None)
        assert status.lent.steps == status.steps > 0
        assert status.lent.requests >= 24, "with SGLang's own request at its start"

    pair.tell(story)


def test_rollouts_stop_while_serving_works_and_do_not_spin(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=300)))
        await pair.until(lambda status: status.running == 1)
        stop = asyncio.Event()
        users = [asyncio.create_task(pair.served(stop, tokens)) for tokens in (90, 140, 220)]  # never done together
        try:
            await pair.until(lambda status: status.state == "parked" and "serving has" in status.why)
            before, cpu_before_s, began_s = pair.worker.status(), cpu_s(pair.process.process_id), time.monotonic()
            await asyncio.sleep(2.0)
            share = (cpu_s(pair.process.process_id) - cpu_before_s) / (time.monotonic() - began_s)
            after = pair.worker.status()
        finally:
            stop.set()
            await asyncio.gather(*users)
        assert after.steps == before.steps
        assert share < 0.2, "a polling engine takes half a core"
        assert (await turn)[3] == "length"

    pair.tell(story)


def test_an_abort_behind_a_closed_gate_needs_no_step_and_keeps_tokens(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        whole = await pair.rollout(pair.request(max_tokens=200))
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=200)))
        await pair.until_made(5)
        await pair.worker.apply_control(tokens=0)
        steps = pair.worker.status().steps
        await pair.client.evict(f"turn-{pair.numbers}")
        tokens, logprobs, _, reason = await turn
        assert (reason, pair.worker.status().steps) == ("abort", steps)
        assert tokens == whole[0][: len(tokens)]
        assert len(tokens) == len(logprobs) >= 5

    pair.tell(story)


def test_a_smaller_grant_makes_decoding_requests_wait_and_changes_no_token(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        whole = await pair.rollout(pair.request(max_tokens=200))
        assert pair.client._keeper is not None
        pair.client._keeper.cancel()  # it would renew the whole grant
        await pair.worker.apply_control(until_s=time.monotonic() + 60.0)
        turns = [asyncio.create_task(pair.rollout(pair.request(max_tokens=200))) for _ in range(3)]
        await pair.until(lambda status: status.running == 3)
        await pair.worker.apply_control(sequences=1)
        status = await pair.until(lambda status: status.running == 1)
        assert status.waiting == 2
        pair.client._keeper = asyncio.create_task(pair.client._keep())
        assert [(await turn)[0] for turn in turns] == [whole[0]] * 3
        assert pair.worker.status().preemptions >= 2

    pair.tell(story)


def test_a_parked_engine_hands_back_its_turns_and_comes_back(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        whole = await pair.rollout(pair.request(max_tokens=200))
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=200)))
        await pair.until_made(5)
        await pair.client.set_wanted(False)
        tokens, _, _, reason = await turn
        assert (reason, tokens) == ("abort", whole[0][: len(tokens)])
        parked = pair.client.lending_status
        assert parked is not None and (parked.state, parked.model, parked.rollout_pages_max) == ("parked", "parked", 0)
        with pytest.raises(Unavailable):
            await pair.rollout(pair.request())
        await pair.client.set_wanted(True)
        assert (await pair.rollout(pair.request(max_tokens=200)))[0] == whole[0]
        with pytest.raises(RequestRefused, match="cannot be limited"):
            await pair.client.adopt(pair.client.desired.__class__(memory_share=0.5))

    pair.tell(story)


def test_new_weights_in_the_middle_of_a_turn(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        first = pair.trainer.publish(0)
        ready = await pair.take(first)
        assert (ready.fault, ready.hash, pair.client.facts.version) == (None, first.hash, first.version)
        before = await pair.rollout(pair.request(max_tokens=40))
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=900)))
        await pair.until_made(5)
        second = pair.trainer.publish(1)
        ready = await pair.take(second)
        assert (ready.fault, ready.hash, pair.intake.hash) == (None, second.hash, second.hash)
        tokens, _, versions, reason = await turn
        swapped_at = versions.index(second.version)
        assert (reason, len(tokens), set(versions[:swapped_at])) == ("length", 900, {first.version})
        assert set(versions[swapped_at:]) == {second.version}
        assert tokens[: min(40, swapped_at)] == before[0][: min(40, swapped_at)]
        hits = pair.worker.status().prefix_hit_tokens
        after = await pair.rollout(pair.request(max_tokens=40))
        assert pair.worker.status().prefix_hit_tokens == hits, "nothing of the old weights is found"
        await is_as_served(pair, after)
        assert after[0] != before[0]

    pair.tell(story)


def test_a_grant_that_is_not_renewed_expires(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        assert pair.client._keeper is not None
        pair.client._keeper.cancel()
        pair.worker.write_control(until_s=time.monotonic() + 0.05)
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=TURN)))
        status = await pair.until(lambda status: status.state == "parked" and "grant is over" in status.why)
        assert not status.gate_open
        pair.client._keeper = asyncio.create_task(pair.client._keep())
        assert (await turn)[3] == "length"

    pair.tell(story)


def test_serving_outlives_a_killed_rollout_engine(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        version, before = pair.client.facts.version, await pair.rollout(pair.request(max_tokens=40))
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=TURN)))
        await pair.until(lambda status: status.waiting + status.running == 1)
        answer = asyncio.create_task(pair.serving.answer(PROMPT, 200))
        os.killpg(pair.process.process_id, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await turn
        assert len((await answer)[0]) == 200
        while pair.client.restarts == 0:
            await asyncio.sleep(0.05)
        assert pair.client.facts.version == version
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=40)))
        while not turn.done():  # the new engine learns what serving's steps cost
            await pair.teach()
        assert (await turn)[0] == before[0], "with the weights of the one before"

    pair.tell(story)


def test_a_killed_serving_engine_closes_the_gate(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=900)))
        await pair.until(lambda status: status.running == 1)
        pair.serving.kill()
        status = await pair.until(lambda status: status.state == "parked")
        assert status.why == "the serving engine is gone"
        turn.cancel()

    pair.tell(story)
