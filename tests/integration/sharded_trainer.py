"""One rank of a real sharded trainer, as a program: FSDP2, or FSDP2 over tensor parallelism, on gloo.

    python -m tests.integration.sharded_trainer RANK RANKS TENSOR_PARALLEL FOLDER

It trains two steps and publishes the sharded module before, between and after them, as any trainer would. Every rank
pushes what it holds and nothing else; the whole weights are gathered only to leave them in the folder, for the test to
compare with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from tests.contract.chain_ends import RUN, SECRET
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rose.weights.chain import RetryPolicy
from rose.weights.layouts import Rule, row_shards, tensor_parallel
from rose.weights.publish import Publisher
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.shards import Layout, Tensor

VERSIONS = 3
TENSORS = [
    Tensor("embed.weight", (37, 12)),
    Tensor("up.weight", (22, 12)),
    Tensor("up.bias", (22,)),
    Tensor("down.weight", (12, 22)),
    Tensor("norm.weight", (12,)),
]
RULES = {"up.weight": Rule(0, 22), "up.bias": Rule(0, 22), "down.weight": Rule(1, 22), "embed.weight": Rule(0, 37)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12)
        self.up = nn.Linear(12, 22)
        self.down = nn.Linear(22, 12, bias=False)
        self.norm = nn.LayerNorm(12, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.down(torch.relu(self.up(hidden))) @ torch.ones(12, 1, dtype=hidden.dtype)


def trainer_layout(ranks: int, degree: int) -> Layout:
    """As the mesh below lays the parameters out: rank = data-parallel rank * degree + tensor-parallel rank."""
    split = {name: rule for name, rule in RULES.items() if name != "embed.weight"}
    over = ranks // degree
    layout = row_shards(tensor_parallel(TENSORS, split, degree), over)
    return [layout[(rank % degree) * over + rank // degree] for rank in range(ranks)]


def sharded_model(ranks: int, degree: int) -> nn.Module:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (ranks // degree, degree), mesh_dim_names=("data", "tensor"))
    if degree > 1:
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(torch.uint16).numpy()


def leave_whole(model: nn.Module, path: Path, rank: int) -> None:
    whole = {name: bits(p.full_tensor()) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert whole.keys() == {tensor.name for tensor in TENSORS}
    if rank == 0:
        np.savez(path, **whole)


def publisher_of(model: nn.Module, folder: Path, rank: int, ranks: int, degree: int, optimizer: Any) -> Publisher:
    """The first rank claims an epoch and tells the others."""

    def made(epoch: int | None) -> Publisher:
        return Publisher(
            model,
            FilesystemRelay(folder / "relay", durable=False),
            run=RUN,
            secret=SECRET,
            optimizer=optimizer,
            tensors=TENSORS,
            layout=trainer_layout(ranks, degree),
            workers=[tensor_parallel(TENSORS, RULES, other) for other in (1, 2, 3)],
            rank=rank,
            epoch=epoch,
            retry=RetryPolicy(limit_s=60),
        )

    first = made(None) if rank == 0 else None
    told = [first.epoch if first is not None else 0]
    distributed.broadcast_object_list(told, src=0)
    return first or made(told[0])


def main(rank: int, ranks: int, degree: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model = sharded_model(ranks, degree)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    publisher = publisher_of(model, folder, rank, ranks, degree, optimizer)
    for version in range(1, VERSIONS + 1):
        publisher.publish(version)
        leave_whole(model, folder / f"whole-{version}.npz", rank)
        optimizer.zero_grad()
        # Ranks that share a model in parallel see the same tokens, or what they replicate would drift apart.
        model(torch.arange(8).reshape(2, 4) + rank // degree).float().square().mean().backward()
        optimizer.step()  # waits until the version before has been read
    publisher.wait()
    publisher.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    os._exit(0)
