"""How a device takes new weights: exactly those that are wanted, whole, by hash, and never at the cost of the old."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.chain_ends import equal
from tests.unit.rollout_world import LoopEngine, eventually, world

from rose.api.worker_messages import NewVersion, VersionReady
from rose.errors import RequestRefused
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.models.tensors import open_tensors, write_tensors
from rose.observe.metrics import Metrics
from rose.weights.codec.codec_kernels import warm_up
from rose.weights.keys import SECRET, for_reading
from rose.weights.manifest import folder_hash
from rose.weights.publish import PublishedVersion, Publisher
from rose.weights.receive import Receiver
from rose.weights.weight_buffers import FOLDER_VARIABLE, PREFIX
from rose.weights.weight_metrics import ReceiveMetrics
from rose.worker.weight_updater import WeightUpdater

RUN = "a-run"
RECEIVED = "rose_weights_received_bytes_total "
SHAPES = {"model.embed_tokens.weight": (12, 4), "model.norm.weight": (4,)}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What takes long once on a machine is not waited for below."""
    warm_up(to_encode=True)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SECRET, "a secret that both sides know")
    (tmp_path / "received").mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "received"))


class Engine(LoopEngine):
    """Reads what it stages, as engines do, and can be told to refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, Any] = {}
        self.folders: list[str] = []
        self.stage_refusal: RequestRefused | None = None
        self._read: dict[str, Any] = {}

    async def stage(self, version: str, folder: str) -> None:
        if self.stage_refusal is not None:
            raise self.stage_refusal
        self.folders.append(folder)
        tensors = open_tensors(folder)
        self._read = {name: tensors.bits16(name).copy() for name in tensors.names()}
        await super().stage(version, folder)

    async def commit(self, version: str) -> None:
        self.weights = self._read
        await super().commit(version)

    def restart(self) -> None:
        """Back to what it was started with."""
        self._engine.swap("0")
        self.weights = {}


class Trainer:
    def __init__(self, relay: Path, **options: Any) -> None:
        self.relay = relay
        self.weights = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        self._publisher = Publisher(self.weights, str(relay), run=RUN, **options)
        self._step = 0

    def publish(self) -> tuple[NewVersion, dict[str, Any]]:
        """A version, and its numbers as bf16."""
        self._step += 1
        for array in self.weights.values():
            array += self._step
        published = self._publisher.publish(self._step).result()
        self._publisher.wait()
        bits = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in self.weights.items()}
        return wanted(self.relay, published), bits


def wanted(relay: Path, published: PublishedVersion) -> NewVersion:
    return NewVersion(published.label, relay=str(relay), run=RUN, hash=published.hash)


class Device:
    """An engine, its intake, and what a gateway hears of it."""

    def __init__(self) -> None:
        self.engine, self.metrics = Engine(), Metrics(process_facts=False)
        self.intake = WeightUpdater(self.engine, ReceiveMetrics(self.metrics))
        self.heard: list[VersionReady] = []
        self.intake.on_ready = self.heard.append

    async def take(self, version: NewVersion) -> VersionReady:
        count = len(self.heard)
        self.intake.request(version)
        await eventually(lambda: len(self.heard) > count)
        return self.heard[-1]


Story = Callable[[Device], Awaitable[None]]


def tell(story: Story) -> None:
    async def told() -> None:
        device = Device()
        running = asyncio.create_task(device.intake.run())
        try:
            await story(device)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await device.engine.close()

    asyncio.run(told())


def test_versions_come_from_the_relay_and_are_known_by_their_hash(tmp_path):
    trainer = Trainer(tmp_path / "relay")

    async def story(device: Device) -> None:
        assert device.intake.hash == ""
        for _ in range(3):
            version, bits = trainer.publish()
            ready = await device.take(version)
            assert (ready.fault, ready.version, ready.hash) == (None, version.version, version.hash)
            assert equal(device.engine.weights, bits) and device.intake.hash == version.hash
            assert ready.size_bytes > 0 and {"total", "stage", "commit"} <= ready.seconds.keys()

    tell(story)


def test_a_device_that_starts_removes_the_weights_of_a_killed_one(tmp_path):
    left = tmp_path / "received" / f"{PREFIX}.{os.geteuid()}.left"
    left.mkdir()

    async def story(device: Device) -> None:
        await eventually(lambda: not left.exists())

    tell(story)


def test_a_device_needs_only_the_read_key(tmp_path, monkeypatch):
    version, bits = Trainer(tmp_path / "relay").publish()
    monkeypatch.setenv(SECRET, for_reading(os.environ[SECRET].encode()).decode())

    async def story(device: Device) -> None:
        assert (await device.take(version)).hash == version.hash
        assert equal(device.engine.weights, bits)

    tell(story)


def test_the_requested_version_is_taken_and_nothing_newer(tmp_path):
    trainer = Trainer(tmp_path / "relay")
    version, bits = trainer.publish()
    trainer.publish()

    async def story(device: Device) -> None:
        assert (await device.take(version)).hash == version.hash
        assert equal(device.engine.weights, bits)

    tell(story)


def test_a_restarted_engine_gets_its_weights_again_without_a_fetch(tmp_path):
    trainer = Trainer(tmp_path / "relay")
    version, bits = trainer.publish()

    async def story(device: Device) -> None:
        await device.take(version)
        shutil.rmtree(tmp_path / "relay")
        device.engine.restart()
        assert device.intake.hash == ""
        ready = await device.take(version)
        assert (ready.fault, ready.hash) == (None, version.hash)
        assert equal(device.engine.weights, bits)
        assert ready.size_bytes == 0 and ready.seconds.keys() == {"stage", "commit"}

    tell(story)


def test_a_version_that_runs_already_is_confirmed(tmp_path):
    version, _ = Trainer(tmp_path / "relay").publish()

    async def story(device: Device) -> None:
        await device.take(version)
        assert (await device.take(version)) == VersionReady(version.version, hash=version.hash)
        assert len(device.engine.folders) == 1

    tell(story)


def test_a_version_missing_in_the_relay_is_reported(tmp_path):
    trainer = Trainer(tmp_path / "relay")
    version, bits = trainer.publish()

    async def story(device: Device) -> None:
        await device.take(version)
        strange = NewVersion("9", relay=version.relay, run=RUN, hash="0" * 32)
        ready = await device.take(strange)
        assert ready.fault is not None and "no version with hash" in ready.fault.what
        assert equal(device.engine.weights, bits) and device.intake.hash == version.hash
        later, newer = trainer.publish()
        assert (await device.take(later)).fault is None and equal(device.engine.weights, newer)

    tell(story)


def test_a_device_without_the_secret_says_what_to_do(tmp_path, monkeypatch):
    version, _ = Trainer(tmp_path / "relay").publish()
    monkeypatch.delenv(SECRET)

    async def story(device: Device) -> None:
        fault = (await device.take(version)).fault
        assert fault is not None and "secret" in fault.what and SECRET in (fault.hint or "")

    tell(story)


def test_an_engine_that_refuses_gets_the_same_weights_again(tmp_path):
    version, bits = Trainer(tmp_path / "relay").publish()

    async def story(device: Device) -> None:
        device.engine.stage_refusal = RequestRefused("another version is being staged")
        ready = await device.take(version)
        assert ready.fault is not None and "being staged" in ready.fault.what and device.intake.hash == ""
        device.engine.stage_refusal = None
        assert (await device.take(version)).fault is None and equal(device.engine.weights, bits)

    tell(story)


def test_of_several_only_the_last_is_installed(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path / "relay")
    first, _ = trainer.publish()
    second, bits = trainer.publish()
    fetching, may_go_on = threading.Event(), threading.Event()
    fetch = Receiver.fetch

    def slow_fetch(self: Receiver, wanted_hash: str = "") -> Any:
        fetching.set()
        assert may_go_on.wait(20)
        return fetch(self, wanted_hash)

    monkeypatch.setattr(Receiver, "fetch", slow_fetch)

    async def story(device: Device) -> None:
        device.intake.request(first)
        await eventually(fetching.is_set)
        device.intake.request(second)
        may_go_on.set()
        await eventually(lambda: bool(device.heard))
        assert [ready.version for ready in device.heard] == [second.version]
        assert equal(device.engine.weights, bits) and len(device.engine.folders) == 1

    tell(story)


def test_another_run_is_followed_and_leaves_nothing_behind(tmp_path):
    first, _ = Trainer(tmp_path / "one").publish()
    successor = Trainer(tmp_path / "two")
    successor.publish()
    second, bits = successor.publish()

    async def story(device: Device) -> None:
        await device.take(first)
        assert (await device.take(second)).hash == second.hash
        assert equal(device.engine.weights, bits)
        await eventually(lambda: not Path(device.engine.folders[0]).exists())
        assert Path(device.engine.folders[1]).exists()

    tell(story)
    asyncio.run(eventually(lambda: not list((tmp_path / "received").iterdir())))


def test_a_device_shows_what_came_in_and_what_went_wrong(tmp_path):
    trainer = Trainer(tmp_path / "relay")
    first, _ = trainer.publish()
    second, _ = trainer.publish()

    async def story(device: Device) -> None:
        read = [(await device.take(version)).size_bytes for version in (first, second)]
        await device.take(NewVersion("9", relay=second.relay, run=RUN, hash="0" * 32))
        device.engine.stage_refusal = RequestRefused("another version is being staged")
        await device.take(first)
        said = device.metrics.exposition().decode()
        for line in (
            "rose_weights_received_versions_total 3.0",  # the last of them arrived, and was not staged
            "rose_weights_pause_seconds_count 2.0",
            'rose_weights_seconds_count{phase="decode"} 3.0',
            'rose_weights_seconds_count{phase="stage"} 2.0',
            'rose_weights_seconds_count{phase="commit"} 2.0',
            'rose_weights_failures_total{kind="WeightsRefused"} 1.0',
            'rose_weights_failures_total{kind="RequestRefused"} 1.0',
            "rose_weights_lag_versions 0.0",
        ):
            assert line in said, said
        [received] = [float(line.split()[1]) for line in said.splitlines() if line.startswith(RECEIVED)]
        assert received > sum(read) > 0

    tell(story)


def test_weights_in_a_folder_have_the_hash_they_have_in_a_relay(tmp_path):
    trainer = Trainer(tmp_path / "relay")
    version, bits = trainer.publish()
    folder = tmp_path / "model"
    folder.mkdir()
    write_tensors(folder / "model.safetensors", trainer.weights, "bf16")
    assert folder_hash(folder) == version.hash

    async def story(device: Device) -> None:
        ready = await device.take(NewVersion("a", str(folder)))
        assert (ready.fault, ready.hash) == (None, version.hash) and equal(device.engine.weights, bits)
        wrong = await device.take(NewVersion("b", str(folder), hash="0" * 32))
        assert wrong.fault is not None and "was published" in wrong.fault.what
        missing = await device.take(NewVersion("c", str(tmp_path / "none")))
        assert missing.fault is not None and device.engine.facts.version == "a"

    tell(story)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0))


def test_a_gateway_gets_the_hash_again_from_a_worker_that_rejoins(tmp_path, model):
    """By HTTP from the trainer, by WebSocket to the worker, from the relay into its engine."""
    version, _ = Trainer(tmp_path / "relay").publish()
    body = {"version": version.version, "relay": version.relay, "run": RUN, "hash": version.hash, "wait_s": 20}

    async def story() -> None:
        async with world(model) as found:
            engine = await found.worker("a")
            reply = {"version": version.version, "ready": ["a"], "behind": {}}
            status, told = await found.ask("POST", "/v1/versions", body)
            assert status == 200 and told.items() >= reply.items() and told["sync_s"].keys() == {"a"}
            assert engine.facts.version == version.version
            member = found.gateway.core.pool.get("a")
            assert member is not None and member.weights.hash == version.hash
            await eventually(lambda: member.heartbeat.hash == version.hash)
            found.gateway.remove_worker(member)
            await eventually(lambda: found.gateway.core.pool.get("a") not in (None, member))
            again = found.gateway.core.pool.get("a")
            assert again is not None and (again.weights.version, again.weights.hash) == (version.version, version.hash)
            said = (await found.ask("GET", "/metrics"))[1].decode()
            assert "rose_weights_received_versions_total 1.0" in said and "rose_weights_pause_seconds_count 1.0" in said
            assert "rose_weights_lag_versions 0.0" in said and "rose_weights_workers_behind 0.0" in said
            for wrong in ({"relay": ""}, {"run": ""}, {"folder": "there"}):
                assert (await found.ask("POST", "/v1/versions", body | wrong))[0] == 400

    asyncio.run(story())


def test_a_gateway_shows_which_worker_is_behind_and_why(tmp_path, model):
    version, _ = Trainer(tmp_path / "relay").publish()
    body = {"version": "lost", "relay": version.relay, "run": RUN, "hash": "0" * 32, "wait_s": 0.1}

    async def story() -> None:
        async with world(model) as found:
            await found.worker("a")
            assert (await found.ask("POST", "/v1/versions", body))[1]["ready"] == []
            member = found.gateway.core.pool.get("a")
            assert member is not None
            await eventually(lambda: bool(member.trouble))
            said = (await found.ask("GET", "/metrics"))[1].decode()
            assert "rose_weights_lag_versions 1.0" in said and "rose_weights_workers_behind 1.0" in said
            assert 'rose_weights_failures_total{kind="RequestRefused"} 1.0' in said
            assert "rose_weights_received_versions_total 0.0" in said

    asyncio.run(story())
