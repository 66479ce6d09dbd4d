"""The weight transfer for TRL: a version is in force once the gateway knows it, and trouble leaves the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.adapters.trl_world import SECRET, FakePool
from tests.unit.test_client import ScriptedGateway, play

from rose.adapters.rose_pool import RosePool
from rose.adapters.trl_weights import TrlWeights
from rose.errors import ModelError, RequestRefused, Unavailable
from rose.models.tensors import open_tensors
from rose.weights.manifest import Fenced, folder_hash

Stream = Iterator[tuple[str, torch.Tensor]]


@pytest.fixture
def stream(folder: Path) -> Callable[[float], Stream]:
    tensors = open_tensors(folder)
    return lambda factor=1.0: ((name, torch.from_numpy(tensors.float32(name) * factor)) for name in tensors.names())


@pytest.fixture
def weights(pool: FakePool) -> Iterator[TrlWeights]:
    made = TrlWeights(pool)
    made.init_weight_transfer()
    yield made
    made.destroy()


def transfer(weights: TrlWeights, stream: Stream) -> None:
    weights.pause()
    weights.send_weights(stream)
    weights.resume()


def test_the_gateway_is_told_the_hash_and_place_of_each_version(pool, weights, stream, folder):
    transfer(weights, stream())
    transfer(weights, stream(0.5))
    first, second = pool.gateway.published
    assert first == {"version": f"1-{folder_hash(folder)[:8]}", "relay": pool.relay, "run": "r",
                     "hash": folder_hash(folder), "wait_s": 0.0}  # fmt: skip
    assert second["version"].startswith("2-") and second["hash"] != first["hash"]
    assert pool.numbers[first["version"]] == 1 and pool.numbers[second["version"]] == 2


def test_a_trainer_that_dies_before_it_told_the_gateway_leaves_the_version_before(pool, weights, stream, folder):
    transfer(weights, stream())
    weights.send_weights(stream(0.5))  # and dies here
    assert len(pool.gateway.published) == 1
    successor = FakePool(folder, pool.relay)
    again = TrlWeights(successor)
    again.init_weight_transfer()
    transfer(again, stream(0.25))
    assert len(successor.gateway.published) == 1
    with pytest.raises(Fenced, match="another trainer has taken over"):
        weights.send_weights(stream())
    assert len(pool.gateway.published) == 1
    again.destroy()


def test_weights_of_another_model_change_nothing(pool, weights, stream):
    transfer(weights, stream())
    with pytest.raises(ModelError, match=r"the trainer's weights are not those of .*, in the folder"):
        weights.send_weights((name, value[:-1]) for name, value in stream())
    assert len(pool.gateway.published) == 1
    transfer(weights, stream(0.5))
    assert [found["version"][:2] for found in pool.gateway.published] == ["1-", "3-"]


@pytest.mark.parametrize(
    "status, error, reason", [(401, RequestRefused, "answered 401: no"), (503, Unavailable, "answered 503: no")]
)
def test_a_gateway_that_cannot_be_used_is_an_error_before_the_first_step(folder, tmp_path, status, error, reason):
    gateway = ScriptedGateway(*[(status, {"error": {"message": "no"}}, {})] * 50)

    async def story(client):
        pool = RosePool(
            folder,
            gateway=client._url,
            relay=str(tmp_path),
            run="r",
            token="a-token",
            secret=SECRET,
            patience_s=0.1,
        )
        with pytest.raises(error, match=reason):
            await asyncio.to_thread(TrlWeights(pool).init_weight_transfer)

    play(gateway, story)


def test_a_gateway_that_is_away_is_an_error_that_names_it(folder, tmp_path):
    pool = RosePool(folder, gateway="http://127.0.0.1:1", relay=str(tmp_path), run="r", token="a", patience_s=0.1)
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1 cannot be reached"):
        TrlWeights(pool).init_weight_transfer()
