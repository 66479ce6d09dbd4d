"""Two vLLM servers on one core: rollouts run in what serving leaves, and serving outlives whatever befalls them.

The rollout engine is kept by an engine client, as `rose lend vllm` does it, and gets its weights as any device does,
from a relay. The serving engine serves the second model, so that it can be asked what rollouts must say after a swap to
it. The stories follow one another. Both engines are killed on the way, and come back as asynchronous ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from tests.vllm import forced_async
from tests.vllm.engines import ServingEngine, asynchronous, cpu_s, memory_bytes, rollout_engine

from rose.api.worker_messages import NewVersion, VersionReady
from rose.core.lending_state import PAUSED
from rose.core.slo import Budgets
from rose.engines.base import Request, Sampling
from rose.engines.token_stream import TokenStream
from rose.errors import ConfigError, ModelError, RoseError, Unavailable
from rose.models.tensors import open_tensors
from rose.observe.metrics import Metrics
from rose.vllm.control_segment import Status
from rose.vllm.engine_process import EngineProcess
from rose.vllm.lend_session import VllmAdminRoutes
from rose.vllm.vllm_agent import VllmEngineClient, VllmLending
from rose.vllm.vllm_client import REQUEST_PREFIX
from rose.vllm.vllm_engine import VllmEngine
from rose.weights.keys import SECRET
from rose.weights.publish import Publisher
from rose.weights.weight_buffers import FOLDER_VARIABLE
from rose.weights.weight_metrics import ReceiveMetrics
from rose.worker.weight_updater import WeightUpdater

TURN = 300  # tokens of a turn that is still under way when something happens
WAIT_S = 60.0  # for anything that should take moments
STORY_S = 240.0
BUDGETS = Budgets(10.0, 2.0, answer_s=60.0)  # that a busy machine keeps too: a circuit breaker would end these stories
PROMPT = [(7 * number) % 250 for number in range(40)]
TOKEN = "an-owner's-token"


class Trainer:
    """Publishes the weights of model folders."""

    def __init__(self, folders: list[Path], relay: Path) -> None:
        self._models = [_weights(folder) for folder in folders]
        self._live = {name: array.copy() for name, array in self._models[0].items()}
        self._publisher = Publisher(self._live, str(relay), run="a-run")
        self._relay, self._step = str(relay), 0

    def publish(self, model: int) -> NewVersion:
        self._step += 1
        for name, array in self._live.items():
            array[...] = self._models[model][name]
        published = self._publisher.publish(self._step).result()
        return NewVersion(published.label, relay=self._relay, run="a-run", hash=published.hash)

    def close(self) -> None:
        self._publisher.close()


def _weights(folder: Path) -> dict[str, Any]:
    tensors = open_tensors(folder)
    return {name: (tensors.bits16(name).astype(np.uint32) << 16).view(np.float32) for name in tensors.names()}


class Pair:
    """A serving engine, a client beside it that keeps a rollout engine, and what brings it new weights."""

    def __init__(self, runner: asyncio.Runner, serving: ServingEngine, trainer: Trainer) -> None:
        self.runner, self.serving, self.trainer = runner, serving, trainer
        self.client: VllmEngineClient
        self.intake: WeightUpdater
        self.heard: list[VersionReady] = []
        self.numbers = 0

    async def start(self, model: Path) -> None:
        await self.serving.ready()
        self.client = VllmEngineClient(VllmLending(rollout_engine(model), self.serving.url, "idle", BUDGETS))
        await self.client.start()
        self.intake = WeightUpdater(self.client, ReceiveMetrics(Metrics(process_facts=False)))
        self.intake.on_ready = self.heard.append
        self._taking = asyncio.create_task(self.intake.run())

    async def close(self) -> None:
        if hasattr(self, "client"):
            self._taking.cancel()
            await asyncio.gather(self._taking, return_exceptions=True)
            await self.client.close()

    def tell(self, story: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        self.runner.run(self._tell(story))

    async def _tell(self, story: Callable[[Pair], Coroutine[Any, Any, None]]) -> None:
        async with asyncio.timeout(STORY_S):
            resuming = asyncio.create_task(self._resume())
            try:
                await story(self)
            finally:
                resuming.cancel()
                self.client.cancel(list(self.client._turns))  # what a story that failed has left

    async def _resume(self) -> None:
        """A circuit breaker that trips on a busy machine is no part of these stories."""
        while True:
            self.client.desired = replace(self.client.desired, resumes=self.client.desired.resumes + 1)
            await asyncio.sleep(0.5)

    @property
    def worker(self) -> VllmEngine:
        assert self.client._engine is not None
        return self.client._engine

    @property
    def process(self) -> EngineProcess:
        assert self.client._process is not None
        return self.client._process

    async def take(self, version: NewVersion) -> VersionReady:
        count = len(self.heard)
        self.intake.request(version)
        while len(self.heard) == count:
            await asyncio.sleep(0.01)
        return self.heard[-1]

    def request(self, max_tokens: int = 24, **sampling: Any) -> Request:
        self.numbers += 1
        settings = Sampling(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **sampling})
        return Request(f"turn-{self.numbers}", tuple(PROMPT), settings)

    async def rollout(self, request: Request) -> tuple[list[int], list[float], list[str], str | None]:
        """Return what an engine client gets for one request."""
        stream, reason = TokenStream(), None
        self.client.submit([request], stream)
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[str] = []
        while reason is None:
            for event in await stream.take():
                tokens += event.token_ids
                logprobs += event.logprobs
                versions += [event.version] * len(event.token_ids)
                reason = event.finish_reason
        return tokens, logprobs, versions, reason

    async def until(self, holds: Callable[[Status], bool]) -> Status:
        deadline_s = time.monotonic() + WAIT_S
        while not holds(status := self.worker.status()):
            assert time.monotonic() < deadline_s, (status.state, status.why, status.running, status.waiting)
            await asyncio.sleep(0.01)
        return status

    async def until_made(self, tokens: int) -> None:
        """So many, of the newest turn: the one before may still be shown."""
        name = f"{REQUEST_PREFIX}turn-{self.numbers}"
        await self.until(lambda status: status.live.get(name, (0, 0))[1] >= tokens)

    async def served(self, stop: asyncio.Event, tokens: int) -> None:
        while not stop.is_set():
            await self.serving.answer(PROMPT, tokens)

    async def teach(self) -> None:
        """Prompts of all lengths, and enough tokens."""
        for number in range(12):
            await asyncio.gather(*(self.serving.answer(PROMPT * (1 + number % 4), 12) for _ in range(2)))


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    forced_async.install(folder)
    return folder


@pytest.fixture(scope="module")
def pair(model_folders: list[Path], tmp_path_factory: pytest.TempPathFactory):
    runner, folder = asyncio.Runner(), tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SECRET, "a secret that both sides know")
        patch.setenv(FOLDER_VARIABLE, str(folder))
        trainer = Trainer(model_folders, folder / "relay")
        made = Pair(runner, ServingEngine(model_folders[1], folder / "log"), trainer)
        try:
            runner.run(made.start(model_folders[0]))
            yield made
        finally:
            runner.run(made.close())
            made.serving.close()
            trainer.close()
            runner.close()


def test_nothing_is_lent_until_serving_is_known(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        turn = asyncio.create_task(pair.rollout(pair.request()))
        status = await pair.until(lambda status: status.waiting == 1 and "learning" in status.why)
        assert (status.steps, status.state, status.gate_open) == (0, "parked", False)
        assert pair.client.trouble is not None and "learning" in pair.client.trouble.what
        await pair.teach()
        tokens, logprobs, _, reason = await turn
        assert (len(tokens), len(logprobs), reason) == (24, 24, "length")
        status = pair.worker.status()
        assert (status.lent.missing, pair.client.trouble) == ("", None)
        assert status.lent.steps == status.steps > 0
        assert status.lent.requests == 24

    pair.tell(story)


def test_a_device_has_one_agent(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        with pytest.raises(ConfigError, match="another agent"):
            VllmEngineClient(pair.client.lending)

    pair.tell(story)


def test_rollouts_stand_still_while_serving_works_and_do_not_spin(pair: Pair) -> None:
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


def test_a_turn_is_evicted_with_everything_so_far_and_memory_goes_back(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        whole = await pair.rollout(pair.request(max_tokens=200))
        memory = memory_bytes(pair.process.process_id)
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=200)))
        await pair.until_made(5)
        await pair.worker.apply_control(kv_bytes=0)
        tokens, logprobs, _, reason = await turn
        assert reason == "abort"
        assert tokens == whole[0][: len(tokens)]
        assert len(tokens) == len(logprobs) >= 5
        assert pair.worker.status().kv_blocks_limit == 0
        assert memory - memory_bytes(pair.process.process_id) > 32 << 20, "of 64 MiB"
        await pair.worker.apply_control(kv_bytes=None)
        assert (await pair.rollout(pair.request(max_tokens=200)))[0] == whole[0]

    pair.tell(story)


def test_a_parked_engine_has_no_memory_and_comes_back_as_it_was(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        whole = await pair.rollout(pair.request(max_tokens=200))
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=200)))
        await pair.until_made(5)
        await pair.client.set_wanted(False)
        assert (await turn)[3] == "abort"
        parked = pair.client.lending_status
        assert parked is not None and (parked.state, parked.model, parked.rollout_pages_max) == ("parked", "parked", 0)
        with pytest.raises(Unavailable):
            await pair.rollout(pair.request())
        await pair.client.set_wanted(True)
        back = pair.client.lending_status
        assert back is not None and (back.state, back.model) == ("lending", "resident")
        assert back.activation_s is not None and back.parking_s is not None
        assert (await pair.rollout(pair.request(max_tokens=200)))[0] == whole[0]

    pair.tell(story)


def test_the_operators_commands_are_obeyed(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        client, runner = pair.client, web.AppRunner(VllmAdminRoutes(pair.client, TOKEN).application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/rose/lending"
        try:
            async with ClientSession() as http, http.get(url) as reply:
                assert reply.status == 401
            async with ClientSession() as http, http.get(url.replace("rose/lending", "metrics")) as reply:
                assert "rose_gate_open" in (figures := await reply.text()) and "rose_lent_seconds_total" in figures
            assert (await asked(url, "pause"))["state"] == "paused"
            assert client.trouble is not None and client.trouble.what == PAUSED.text
            waiting = asyncio.create_task(pair.rollout(pair.request()))
            halved = await asked(url, "limits", memory_share=0.5, compute_share=0.5)
            assert (halved["memory_share"], halved["compute_share"], waiting.done()) == (0.5, 0.5, False)
            drained = await asked(url, "drain")
            assert (drained["state"], drained["rollout_pages_max"]) == ("drained", 0)
            assert await waiting == ([], [], [], "abort")
            resumed = await asked(url, "resume")
            assert resumed["state"] == "lending"
            assert resumed["rollout_pages_max"] == int(str(resumed["pages"])) // 2
            assert (await asked(url, "limits", memory_share=1.0, compute_share=1.0))["compute_share"] == 1.0
            assert "error" in await asked(url, "nonsense")
        finally:
            await runner.cleanup()

    pair.tell(story)


async def asked(url: str, action: str, **body: float) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with ClientSession(headers=headers) as http, http.post(f"{url}/{action}", json=body) as reply:
        found: dict[str, object] = await reply.json()
        return found


def test_new_weights_from_the_relay_in_the_middle_of_a_turn(pair: Pair) -> None:
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
        assert {"total", "stage", "commit"} <= ready.seconds.keys()
        tokens, _, versions, reason = await turn
        swapped_at = versions.index(second.version)
        assert (reason, len(tokens), set(versions[:swapped_at])) == ("length", 900, {first.version})
        assert tokens[: min(40, swapped_at)] == before[0][: min(40, swapped_at)]
        hits = pair.worker.status().prefix_hit_tokens
        after = await pair.rollout(pair.request(max_tokens=40))
        assert pair.worker.status().prefix_hit_tokens == hits, "nothing of the old weights is found"
        await is_as_served(pair, after)
        assert after[0] != before[0]

    pair.tell(story)


async def is_as_served(pair: Pair, rollout: tuple[list[int], list[float], list[str], str | None]) -> None:
    """By an engine that was started with these weights; its kernels are others, so the last digits differ."""
    tokens, logprobs = await pair.serving.answer(PROMPT, 40)
    assert rollout[0] == tokens
    assert rollout[1] == pytest.approx(logprobs, abs=1e-4)


def test_an_update_that_is_refused_leaves_everything_as_it_was(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        worker, version = pair.worker, pair.client.facts.version
        worker._staged = "never staged"  # so that only the engine knows
        with pytest.raises(ModelError, match="is not staged"):
            await worker.commit("never staged")
        with pytest.raises(ModelError, match="no weights"):
            await pair.client.stage("nowhere", str(pair.serving.log.parent / "nowhere"))
        after = await pair.rollout(pair.request(max_tokens=40))
        assert (set(after[2]), pair.client.facts.version) == ({version}, version)
        await is_as_served(pair, after)

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


def test_a_swap_that_fails_half_way_ends_the_engine_and_it_comes_back_with_whole_weights(
    pair: Pair, plugins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(pair: Pair) -> None:
        client, version, plain = pair.client, pair.client.facts.version, pair.worker._call

        async def lost(path: str, body: Any) -> dict[str, Any]:
            if path == "/finish_weight_update":
                raise Unavailable("the answer was lost")
            return await plain(path, body)

        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=TURN)))
        await pair.until_made(5)
        monkeypatch.setattr(pair.worker, "_call", lost)
        client.lending = replace(client.lending, engine=asynchronous(client.lending.engine, plugins))
        third = pair.trainer.publish(0)
        ready = await pair.take(third)
        assert ready.fault is not None and "not known which weights" in ready.fault.what
        with pytest.raises(RoseError):
            await turn
        while client.restarts == 0:
            await asyncio.sleep(0.05)
        assert (client.facts.version, pair.intake.hash != third.hash) == (version, True)
        while client.trouble is not None:  # it learns anew, from what the segment still has and from what follows
            await pair.teach()
        await is_as_served(pair, await pair.rollout(pair.request(max_tokens=40)))
        ready = await pair.take(third)
        assert (ready.fault, ready.hash, client.facts.version) == (None, third.hash, third.version)

    pair.tell(story)


def test_a_killed_serving_engine_closes_the_gate_until_its_successor_is_known(
    pair: Pair, plugins: Path, model_folders: list[Path], tmp_path: Path
) -> None:
    async def story(pair: Pair) -> None:
        before = await pair.serving.answer(PROMPT, 40)
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=TURN)))
        await pair.until(lambda status: status.running == 1)
        pair.serving.kill()
        status = await pair.until(lambda status: status.state == "parked")
        assert status.why == "the serving engine is gone"
        port = pair.serving.port
        pair.serving = ServingEngine(model_folders[1], tmp_path / "log", "AsyncServingScheduler", port, plugins)
        await pair.serving.ready()
        status = await pair.until(lambda status: "learning" in status.why)
        assert (await pair.serving.answer(PROMPT, 40))[0] == before[0]
        await pair.teach()
        assert (await turn)[3] == "length"
        assert pair.worker.status().lent.requests == 25

    pair.tell(story)


def test_serving_outlives_a_killed_rollout_engine(pair: Pair) -> None:
    async def story(pair: Pair) -> None:
        turn = asyncio.create_task(pair.rollout(pair.request(max_tokens=TURN)))
        await pair.until(lambda status: status.waiting + status.running == 1)
        answer = asyncio.create_task(pair.serving.answer(PROMPT, 200))
        worker = pair.worker
        os.killpg(pair.process.process_id, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await turn
        assert len((await answer)[0]) == 200
        with pytest.raises(Unavailable):
            worker.status()

    pair.tell(story)
