"""The rollout worker for TRL with a real gateway and a real device; TRL itself is not needed for that."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.integration import devices, gateways
from tests.unit.adapters.trl_world import publish, settings, take

from rose.adapters.trl import RosePool, TrlWeights, TrlWorker
from rose.errors import RequestRefused
from rose.models.presets import write_preset
from rose.weights.keys import SECRET

DATASET = [{"prompt": f"Number {n}."} for n in range(8)]
SIZE, GROUPS = 4, 24


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "frozenlake-1m", seed=0)


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gateways.TOKENS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SECRET, "a-secret-of-these-tests-and-no-other")


def start_gateway(model: Path, folder: Path, port: int) -> devices.Device:
    arguments = [f"port={port}", f"ledger={folder / 'ledger'}", "beat_s=0.2", "lease_s=3"]
    return devices.start(["-m", "tests.integration.gateway_process", str(model), *arguments], model)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rollouts_survive_kill_9_of_the_gateway_and_none_comes_twice(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with ExitStack() as stack:
        gateway = start_gateway(model, tmp_path, port)
        stack.callback(lambda: devices.end(gateway))
        stack.enter_context(gateways.worker(model, gateway.url, "a"))
        pool = RosePool(model, gateway=gateway.url, relay=str(tmp_path / "relay"), run="r", patience_s=60.0)
        stack.callback(publish(pool).destroy)
        args = settings(max_completion_length=24, max_inflight_tasks=16)
        worker = TrlWorker(pool, args, DATASET, even_share)
        worker.update_model_version(1)
        worker.start()
        stack.callback(worker.stop)
        rows = take(worker, 3 * SIZE)
        for _ in range(2):
            os.kill(gateway.process.pid, signal.SIGKILL)
            gateway.process.wait()
            gateway = start_gateway(model, tmp_path, port)
            rows += take(worker, 4 * SIZE)
        rows += take(worker, GROUPS * SIZE - len(rows))
        worker.check_health(300.0)
        assert set(Counter(row.group_id for row in rows).values()) == {SIZE}
        assert set(worker.counts) == {"begun", "delivered"}
        assert {row.model_version for row in rows} == {1}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_turns_wait_for_a_worker_longer_than_the_trainers_patience(model: Path, tmp_path: Path) -> None:
    with gateways.gateway(model, "wait_s=0.5") as running:  # after which the gateway answers 503 to a turn
        pool = RosePool(model, gateway=running.url, relay=str(tmp_path / "relay"), run="r", patience_s=1.0)
        weights = publish(pool)
        worker = TrlWorker(pool, settings(), DATASET, even_share)
        worker.update_model_version(1)
        worker.start()
        devices.eventually(lambda: worker.counts["begun"] > 0)
        time.sleep(4.0)  # several times what both wait
        worker.check_health(300.0)
        with gateways.worker(model, running.url, "late"):
            assert len(take(worker, 2 * SIZE)) == 2 * SIZE
        worker.stop()
        weights.destroy()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_new_trainer_goes_on_after_the_batches_of_the_one_before(model: Path, tmp_path: Path) -> None:
    with gateways.gateway(model) as running, gateways.worker(model, running.url, "a"):
        for life in range(2):
            pool = RosePool(model, gateway=running.url, relay=str(tmp_path / "relay"), run="r")
            weights = publish(pool)
            worker = TrlWorker(pool, settings(), DATASET, even_share)
            worker.update_model_version(1)
            worker.start()
            assert len(take(worker, 4 * SIZE)) == 4 * SIZE, life
            worker.stop()  # with groups that are not finished, and a batch that is not confirmed
            weights.destroy()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wrong_token_is_refused_before_a_rollout_begins(model: Path, tmp_path: Path) -> None:
    with gateways.gateway(model) as running:
        where = {"gateway": running.url, "relay": str(tmp_path), "run": "r"}
        with pytest.raises(RequestRefused, match="401"):
            TrlWeights(RosePool(model, token="not-the-token-of-this-one", **where)).init_weight_transfer()
        with pytest.raises(RequestRefused, match=r"403.*for the role trainer"):
            publish(RosePool(model, token=gateways.AGENT, **where))
        assert running.pool()["version"] is None
