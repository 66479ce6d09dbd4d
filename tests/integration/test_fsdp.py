"""Ranks that torchrun starts publish what FSDP2 has left them, each its own; the worker runs exactly the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.integration import devices, gateways
from tests.integration.torch_ranks import torchrun

from rose.models.presets import write_preset
from rose.models.tensors import open_tensors
from rose.weights.keys import SECRET
from rose.weights.manifest import content_hash, version_hash
from rose.weights.reading import ChainReader
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.shards import Tensor

PRESET, RUN = "qwen3-3m", "fsdp-test"
RELAY_SECRET = "a-secret-of-these-tests-and-no-other"


@pytest.fixture(scope="module", autouse=True)
def secrets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gateways.TOKENS.items():
            patch.setenv(name, value)
        patch.setenv(SECRET, RELAY_SECRET)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(PRESET, tmp_path_factory.mktemp("models") / PRESET, seed=0)


@pytest.fixture(scope="module")
def running(model: Path, secrets: None) -> Iterator[gateways.RunningGateway]:
    with gateways.gateway(model) as found, gateways.worker(model, found.url, "a"):
        found.has_open(1)
        yield found


def hash_of_whole(folder: Path) -> str:
    """Return the hash of the whole weights that rank 0 left, cut where the newest version is cut."""
    whole = open_tensors(folder / "whole")
    tensors = [Tensor(name, whole.shape(name)) for name in whole.names()]
    reader = ChainReader(FilesystemRelay(folder / "relay"), run=RUN, secret=RELAY_SECRET.encode(), tensors=tensors)
    newest = reader.refresh()
    assert newest is not None and newest.version == 4
    manifest, chunks = reader.manifest_of(newest), []
    for chunk in manifest.chunks:
        part = whole.bits16(manifest.tensors[chunk.tensor].name)[tuple(map(slice, chunk.start, chunk.stop))]
        chunks.append(msgspec.structs.replace(chunk, content_hash=content_hash(np.ascontiguousarray(part), "BF16")))
    return version_hash(manifest.tensors, chunks)


@pytest.mark.parametrize(
    "ranks, way, dtype",
    [
        pytest.param(2, "fsdp", "float32", id="2-ranks"),
        pytest.param(4, "fsdp", "bfloat16", id="4-ranks-bf16", marks=pytest.mark.slow),
        pytest.param(4, "hybrid", "float32", id="2-by-2-hybrid", marks=pytest.mark.slow),
        pytest.param(4, "tensor", "float32", id="2-by-2-tensor-parallel", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(500)
def test_the_worker_runs_the_weights_of_all_ranks(
    model: Path, running: gateways.RunningGateway, tmp_path: Path, ranks: int, way: str, dtype: str, capsys: Any
) -> None:
    torchrun(ranks, "-m", "tests.integration.fsdp_rank", str(model), str(tmp_path), running.url, way, dtype)
    said = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    expected = hash_of_whole(tmp_path)
    assert {rank["hash"] for rank in said} == {expected}
    devices.eventually(lambda: running.members(hash=expected) == ["a"])
    assert len({rank["label"] for rank in said}) == 1 and running.pool()["version"] == said[0]["label"]

    with capsys.disabled():
        print(f"\n{ranks} ranks, {way}, {dtype}: pushed {[rank['pushed_bytes'] for rank in said]}")
    assert all(rank["kinds"] == ["anchor", "delta"] for rank in said)
    for version, size in enumerate(said[0]["size_bytes"]):
        pushed = [rank["pushed_bytes"][version] for rank in said]
        assert sum(pushed) == size > 0
        assert max(pushed) < 1.5 * size / ranks, "each rank pushes about its share"

    if way == "fsdp":
        # In version 3 the last rank has a number that is not finite.
        *others, last = [rank["errors"] for rank in said]
        what = "`model.norm.weight` holds numbers that are not finite; this version is not published"
        assert last == [f"ModelError: {what}"]
        assert all(len(found) == 1 and what in found[0] for found in others)
        assert {rank["kind"] for rank in said} == {"anchor"}, "after a fault the next version is whole"
