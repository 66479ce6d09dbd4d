"""What slime does around its two hooks: its samples, its folders, and one rank of its disk weight update.

    python -m tests.integration.slime_rank RANK RANKS MODEL FOLDER GATEWAY

The order of calls is that of slime 0.3.1 (`UpdateWeightFromDisk.update_weights`): all ranks meet, each writes, all
meet, each calls the hook, all meet. When that has returned slime deletes the folder.
"""

from __future__ import annotations

import enum
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as distributed
from safetensors.torch import load_file, save_file

FACTORS = (1.0, 0.5)


class Status(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """The fields that slime's and miles' samples have in common, with their defaults."""

    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


def sampling_params(**changes: Any) -> dict[str, Any]:
    """Return what slime makes of its default arguments."""
    return {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 24,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    } | changes


def weights(model: Path, factor: float) -> dict[str, torch.Tensor]:
    found = load_file(model / "model.safetensors")
    return found | {"model.norm.weight": found["model.norm.weight"] * factor}


def write_version(model: Path, folder: Path, factor: float) -> Path:
    """Write a version as slime does: the model's other files, two shards, and last of all the index."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy2(file, folder / file.name)
    tensors = weights(model, factor)
    names, places = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file_name = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file_name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def main(rank: int, ranks: int, model: Path, folder: Path, gateway: str) -> None:
    from rose.adapters.slime import publish

    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    arguments = {"rose_gateway": gateway, "rose_relay": str(folder / "relay"), "rose_run": "slime-test"}
    args = SimpleNamespace(hf_checkpoint=str(model), **arguments)
    for number, factor in enumerate(FACTORS, start=1):
        version = folder / f"weight_v{number:06d}"
        if rank == 0:
            write_version(model, version, factor)
        distributed.barrier()
        publish(args, str(version), [])
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(version)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    os._exit(0)
