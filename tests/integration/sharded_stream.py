"""One rank of a trainer that shards its model by FSDP2 and hands out whole tensors one by one, as TRL does.

    python -m tests.integration.sharded_stream RANK RANKS MODEL FOLDER

Rank 0 publishes what the iterator yields, and the other ranks only advance it. In version 2 a number is not finite, so
nothing is published; every rank must come to the end of the iterator all the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as distributed
from tests.contract.chain_ends import RUN, SECRET
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rose.adapters.streamed import StreamedPublisher
from rose.errors import ModelError


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in model.named_parameters():
        yield name, value.full_tensor()


def main(rank: int, ranks: int, source: str, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    publisher = StreamedPublisher(source, str(folder / "relay"), run=RUN, secret=SECRET) if rank == 0 else None
    for version, factor in enumerate((0.5, float("nan"), 2.0), start=1):
        with torch.no_grad():
            model.model.norm.weight.to_local().mul_(factor)
        if publisher is None:
            for _ in tensors(model):
                pass
        else:
            publish(publisher, version, model)
        distributed.barrier()
        if version == 2:
            with torch.no_grad():
                model.model.norm.weight.to_local().fill_(0.5)
    if publisher is not None:
        publisher.close()
    distributed.destroy_process_group()


def publish(publisher: StreamedPublisher, version: int, model: nn.Module) -> None:
    try:
        print(publisher.publish(version, tensors(model)).hash, flush=True)
    except ModelError:
        print("refused", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    os._exit(0)
