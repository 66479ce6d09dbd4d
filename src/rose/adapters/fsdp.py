"""Publishing a model that FSDP2 shards, from all ranks at once: each pushes its own shard, and nothing is gathered.

    pool = RosePool(MODEL, gateway="http://gateway:8002", relay="http://relay:7070", run="my-run")
    publisher = ShardedPublisher(model, pool)        # on every rank, after fully_shard
    for step in range(1, steps + 1):
        publisher.publish(step)                      # on every rank; then rollouts, loss.backward(), optimizer.step()

DTensors say which part of which tensor a rank has, over meshes of any number of dimensions. So hybrid sharding works
too, and tensor parallelism under FSDP2. Of several ranks that have the same part one pushes it, and keeps a bf16 copy.

Every call is collective. A fault of one rank is an error on every rank, so that none of them waits in the next
collective call. The version after a fault goes out whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rose.adapters.rose_pool import RosePool
from rose.adapters.streamed import HEAD, differences_error
from rose.errors import Unavailable
from rose.models.tensors import expected_tensors
from rose.weights.live_tensors import checkpoint_name
from rose.weights.publish import PublishedVersion, Publisher
from rose.weights.shards import LayoutError, Point, ShardPlacement, Tensor, TensorRegion

Result = TypeVar("Result")


class ShardedPublisher:
    """Publishes a model from every rank of a process group, which must carry objects. Options are `Publisher`'s."""

    def __init__(self, model: Any, pool: RosePool, *, group: Any = None, **options: Any) -> None:
        self._pool, self._group = pool, group
        self._distributed: Any = sys.modules["torch.distributed"]  # a sharded model has imported it
        self._rank: int = self._distributed.get_rank(group)
        self._source = _ModelShards(model, expected_tensors(pool.folder.spec))
        held = self._on_all(self._source.held)
        found = set[str]().union(*(differences for _, differences in held))
        placed = {placement.local for placements, _ in held for placement in placements}
        found |= {f"`{name}` is on no rank" for name in self._source.shapes if name not in placed}
        if found:
            raise differences_error(pool.folder.path, sorted(found))
        tensors = [Tensor(name, shape) for name, shape in self._source.shapes.items()]
        where = {"run": pool.run, "secret": pool.secret, "layout": [placements for placements, _ in held]}
        self._options = options | where | {"tensors": tensors, "rank": self._rank}
        epoch = self._on_all(lambda: self._open(None) if self._rank == 0 else None)[0]
        self._on_all(lambda: self._open(epoch) if self._rank != 0 else None)

    def publish(self, version: int, *, wait_s: float = 0.0) -> PublishedVersion:
        """Publish the weights as they are now, tell the gateway, and return the version; the same on every rank.

        Waits up to `wait_s` for workers to run it. `pushed_bytes` of the version is what this rank has pushed.
        """
        try:
            parts = self._on_all(lambda: self._publisher.publish(version).result())
        except Exception:
            self._publisher.begin_anew()
            raise
        new = replace(parts[0], pushed_bytes=parts[self._rank].pushed_bytes)
        pool = self._pool
        where: dict[str, Any] = {"relay": pool.relay, "run": pool.run, "hash": new.hash, "wait_s": wait_s}
        self._on_all(lambda: pool.ask(lambda client: client.publish(new.label, **where)) if self._rank == 0 else None)
        return new

    def close(self) -> None:
        self._publisher.close()

    def _open(self, epoch: int | None) -> int:
        """Open this rank's publisher, and return its epoch. The first rank claims one."""
        if epoch is None:  # a wrong token or address is an error before anything is encoded
            self._pool.ask(lambda client: client.pool())
        self._publisher = Publisher(self._source, self._pool.relay, epoch=epoch, **self._options)
        return self._publisher.epoch

    def _on_all(self, call: Callable[[], Result]) -> list[Result]:
        """Call on every rank, and return all results by rank. Raises the same fault on every rank.

        A rank that waited for another one is Unavailable; the fault of the other one explains more.
        """
        result, error = None, None
        try:
            result = call()
        except Exception as caught:
            error = caught
        outcomes: list[Any] = [None] * self._distributed.get_world_size(self._group)
        mine = (result, f"{type(error).__name__}: {error}" if error else "")
        self._distributed.all_gather_object(outcomes, mine, group=self._group)
        faults = [(text.startswith("Unavailable"), rank, text) for rank, (_, text) in enumerate(outcomes) if text]
        if not faults:
            return [found for found, _ in outcomes]
        _, rank, text = min(faults)
        if error is not None and rank == self._rank:
            raise error
        raise Unavailable(f"rank {rank} failed: {text}") from error


class _ModelShards:
    """The tensors of a model that are in its folder, as this rank has them."""

    def __init__(self, model: Any, shapes: Mapping[str, Point]) -> None:
        self._model, self.shapes = model, shapes

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards by name; FSDP2 first frees what a forward pass has left gathered."""
        named = {checkpoint_name(name): tensor for name, tensor in self._model.state_dict().items()}
        return {name: tensor for name, tensor in named.items() if name in self.shapes or name != HEAD}

    def held(self) -> tuple[list[ShardPlacement], set[str]]:
        """Return what this rank has, and how it differs from the folder. A tied `lm_head` is left out."""
        placements, differences = list[ShardPlacement](), set[str]()
        for name, tensor in self.state_dict().items():
            shape, expected = tuple(tensor.shape), self.shapes.get(name)
            if shape == expected:
                placements += _placement(name, tensor)
            else:
                what = "not in the folder" if expected is None else f"{list(shape)}, in the folder {list(expected)}"
                differences.add(f"`{name}` is {what}")
        return placements, differences


def _placement(name: str, tensor: Any) -> list[ShardPlacement]:
    """Return the place of this rank's part of a tensor; none if the rank has no part of it."""
    local = tuple((tensor.to_local() if hasattr(tensor, "to_local") else tensor).shape)
    region = _region(name, tensor) if hasattr(tensor, "placements") else Tensor(name, local).whole()
    if region.shape != local:
        raise LayoutError(f"`{name}` is {list(local)} on this rank, and its placement says {list(region.shape)}")
    return [ShardPlacement(region, name, local, (0,) * len(local))] if math.prod(local) else []


def _region(name: str, tensor: Any) -> TensorRegion:
    """Return the part of a tensor that its placements give to this rank, cut as `torch.chunk` cuts.

    Strided shards, of FSDP2 over tensor parallelism, cut what later dimensions of the mesh have left.
    """
    start, stop = [0] * tensor.ndim, list(tensor.shape)
    axes = sorted(enumerate(tensor.placements), key=lambda entry: hasattr(entry[1], "split_factor"))
    for axis, placement in axes:
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise LayoutError(f"`{name}` is {placement} over the mesh", hint="publish between optimizer steps")
        dim, ranks = placement.dim, tensor.device_mesh.size(axis)
        run = math.ceil((stop[dim] - start[dim]) / ranks)
        first = min(start[dim] + run * tensor.device_mesh.get_local_rank(axis), stop[dim])
        start[dim], stop[dim] = first, min(first + run, stop[dim])
    return TensorRegion(name, tuple(start), tuple(stop))
