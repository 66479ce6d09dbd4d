"""One rank of a trainer that shards its model by FSDP2 and publishes by rose.adapters.fsdp; torchrun starts it.

    torchrun --nproc-per-node 2 -m tests.integration.fsdp_rank MODEL FOLDER GATEWAY WAY DTYPE

WAY is `fsdp`, `hybrid` (replicated over two halves of the ranks) or `tensor` (FSDP2 over tensor parallelism). The whole
weights are gathered after publishing, and only to leave them in the folder for the test to compare with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from rose.adapters.fsdp import ShardedPublisher
from rose.adapters.trl import RosePool
from rose.errors import RoseError
from rose.models.tensors import write_tensors
from rose.weights.chain import RetryPolicy

RUN = "fsdp-test"
QUICK = RetryPolicy(limit_s=5.0)  # of a rank that waits for another one, which has failed
SPLIT = {"mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel, "mlp.down_proj": RowwiseParallel}


def sharded_model(source: str, way: str, dtype: torch.dtype) -> nn.Module:
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    ranks = distributed.get_world_size()
    shape, names = ((ranks,), ("data",)) if way == "fsdp" else ((ranks // 2, 2), ("data", "other"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        if way == "tensor":
            parallelize_module(layer, mesh["other"], {name: style() for name, style in SPLIT.items()})
        fully_shard(layer, mesh=mesh["data"] if way == "tensor" else mesh)
    fully_shard(model, mesh=mesh["data"] if way == "tensor" else mesh)
    return model


def leave_whole(model: nn.Module, path: Path) -> None:
    arrays = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        arrays[name] = whole.detach().float().numpy()
    arrays.pop("lm_head.weight")
    if distributed.get_rank() == 0:
        path.parent.mkdir()
        write_tensors(path, arrays)


def last_norm(model: nn.Module) -> torch.Tensor:
    """Return this rank's part of a tensor, as memory that the model has."""
    local: torch.Tensor = model.state_dict()["model.norm.weight"].to_local()
    return local


def main(source: str, folder: Path, gateway: str, way: str, dtype: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model: Any = sharded_model(source, way, getattr(torch, dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pool = RosePool(source, gateway=gateway, relay=str(folder / "relay"), run=RUN)
    publisher = ShardedPublisher(model, pool, retry=QUICK)
    tokens = torch.arange(24).reshape(2, 12) + (0 if way == "tensor" else rank)
    said: dict[str, Any] = {"rank": rank, "kinds": [], "pushed_bytes": [], "size_bytes": [], "errors": []}
    for version in (1, 2):
        new = publisher.publish(version)
        for key, value in (("kinds", new.kind), ("pushed_bytes", new.pushed_bytes), ("size_bytes", new.size_bytes)):
            said[key].append(value)
        optimizer.zero_grad()
        model(tokens).logits.float().square().mean().backward()
        optimizer.step()
    before, is_spoilt = float(last_norm(model)[0]), way == "fsdp" and rank == ranks - 1
    if is_spoilt:
        last_norm(model)[0] = float("nan")
    with torch.no_grad():
        model(tokens)  # leaves the last layers gathered, as an evaluation does
    assert not isinstance(model.model.norm.weight, DTensor)
    try:
        publisher.publish(3)
    except RoseError as error:
        said["errors"].append(f"{type(error).__name__}: {error.what}")
    if is_spoilt:
        last_norm(model)[0] = before
    new = publisher.publish(4)
    said |= {"hash": new.hash, "label": new.label, "kind": new.kind}
    leave_whole(model, folder / "whole" / "model.safetensors")
    publisher.close()
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    os._exit(0)
