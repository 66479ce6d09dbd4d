"""Publishing what FSDP2 has left on this rank: where the parts are, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from tests.unit.adapters.trl_world import FakePool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rose.adapters.fsdp import ShardedPublisher, _placement
from rose.errors import ModelError, RequestRefused
from rose.models.tensors import open_tensors
from rose.weights.shards import LayoutError, Tensor, check_cover

MESHES: dict[str, tuple[tuple[int, ...], list[Any], bool]] = {
    "rows": ((4,), [Shard(0)], False),
    "columns": ((4,), [Shard(1)], False),
    "replicated": ((4,), [Replicate()], True),
    "hybrid": ((2, 2), [Replicate(), Shard(0)], True),
    "rows-and-columns": ((2, 2), [Shard(0), Shard(1)], False),
    "rows-twice": ((2, 3), [Shard(0), Shard(0)], False),
}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (1, 4)], ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_every_rank_knows_which_part_it_has(name: str, shape: tuple[int, ...]) -> None:
    mesh_shape, placements, is_replicated = MESHES[name]
    numbers = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    regions = []
    ranks = torch.Size(mesh_shape).numel()
    for rank in range(ranks):
        distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", mesh_shape)
        tensor = distribute_tensor(numbers, mesh, placements, src_data_rank=None)
        for placement in _placement("w", tensor):
            assert torch.equal(tensor.to_local(), numbers[placement.region.slices(Tensor("w", shape).whole())])
            regions.append(placement.region)
        distributed.destroy_process_group()
    check_cover([Tensor("w", shape)], sorted(set(regions)))
    assert (len(set(regions)) < len(regions)) == is_replicated


def test_a_sum_that_is_not_finished_is_no_weight() -> None:
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensor = torch.distributed.tensor.DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
        with pytest.raises(LayoutError, match="over the mesh"):
            _placement("w", tensor)
    finally:
        distributed.destroy_process_group()


def model_of(folder: Path, **changes: Any) -> Any:
    """Return a model by its state, with tied weights under both names."""
    tensors = open_tensors(folder)
    state = {name: torch.from_numpy(tensors.float32(name).copy()) for name in tensors.names()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    state = {name: tensor for name, tensor in (state | changes).items() if tensor is not None}
    return SimpleNamespace(state_dict=lambda: state)


@pytest.mark.usefixtures("one_rank")
def test_a_version_is_published_and_the_gateway_is_told(pool: FakePool, folder: Path) -> None:
    publisher = ShardedPublisher(model_of(folder), pool)
    found = [publisher.publish(number) for number in (1, 2)]
    assert [new.kind for new in found] == ["anchor", "delta"] and found[0].pushed_bytes == found[0].size_bytes > 0
    [first, second] = pool.gateway.published
    assert first | {"wait_s": 0.0} == first and first["relay"] == pool.relay and first["run"] == pool.run
    assert (first["version"], second["hash"]) == (found[0].label, found[1].hash)
    publisher.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "changes, error",
    [
        ({"model.norm.weight": None}, r"`model\.norm\.weight` is on no rank"),
        ({"model.norm.weight": torch.ones(3)}, r"`model\.norm\.weight` is \[3\], in the folder \[160\]"),
        ({"model.adapter": torch.ones(3)}, r"`model\.adapter` is not in the folder"),
    ],
)
def test_a_model_that_is_not_the_folders_is_refused(pool: FakePool, folder: Path, changes: Any, error: str) -> None:
    with pytest.raises(ModelError, match=error):
        ShardedPublisher(model_of(folder, **changes), pool)


@pytest.mark.usefixtures("one_rank")
def test_the_version_after_a_fault_is_whole(pool: FakePool, folder: Path) -> None:
    model = model_of(folder)
    publisher = ShardedPublisher(model, pool)
    publisher.publish(1)
    model.state_dict()["model.norm.weight"][0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        publisher.publish(2)
    model.state_dict()["model.norm.weight"][0] = 1.0
    assert publisher.publish(3).kind == "anchor" and publisher.publish(4).kind == "delta"
    publisher.close()


@pytest.mark.usefixtures("one_rank")
def test_a_gateway_that_refuses_is_asked_before_anything_is_encoded(
    pool: FakePool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> Any:
        raise RequestRefused("the gateway answered 401")

    monkeypatch.setattr(pool.gateway, "pool", refuse)
    with pytest.raises(RequestRefused, match="401"):
        ShardedPublisher(model_of(folder), pool)
    assert not Path(pool.relay).exists()
