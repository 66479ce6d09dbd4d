from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.adapters.trl_world import DATASET, FakePool, by_member, settings

from rose.adapters.trl import TrlWorker
from rose.models.presets import write_preset

MakeWorker = Callable[..., TrlWorker]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("models") / "frozenlake-1m", seed=0)


@pytest.fixture
def pool(folder: Path, tmp_path: Path) -> FakePool:
    return FakePool(folder, str(tmp_path / "relay"))


@pytest.fixture
def worker(pool: FakePool) -> Iterator[MakeWorker]:
    """Makes workers of the pool that have seen version 1, and stops them."""
    made: list[TrlWorker] = []

    def make(reward: Any = by_member, dataset: Any = DATASET, environment: str = "", **changes: Any) -> TrlWorker:
        rewards = () if environment else reward
        made.append(TrlWorker(pool, settings(**changes), dataset, rewards, environment=environment))
        made[-1].update_model_version(1)
        return made[-1]

    yield make
    for found in made:
        found.stop()
