"""Checkpoints of several ranks: every rank writes its own rows, and nothing is gathered but one tensor at a time.

    step-000012/
      model-00001-of-00002.safetensors, ...           the weights in bf16, whole tensors dealt out over the files
      model.safetensors.index.json                    which tensor is in which of them, for engines
      trainer/state-00001-of-00002.safetensors, ...   by rank, its rows of the fp32 weights and moments
      trainer/state.json                              as always, with the number of ranks and a digest of each file

`checkpoint.load_checkpoint` reads them on any number of ranks: each takes its rows from whichever files hold them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import ModelError
from rose.models.tensors import INDEX, write_tensors
from rose.train.checkpoint import appearing, copy_companions, state_values, write_tensor_state
from rose.train.checkpoint_state import STATE_FOLDER, digest_of, shard_files, write_state
from rose.train.module_model import whole
from rose.train.sharded_step import ShardedTrainer


def save_sharded(
    trainer: ShardedTrainer,
    source: Path,
    out: Path,
    extra: Mapping[str, Any],
    write_shards: Callable[[Path], Sequence[str]],
) -> None:
    """Write a checkpoint, on rank 0. `write_shards` has every rank call `write_shard`, and returns what they did."""
    with appearing(out) as fresh:
        copy_companions(source, fresh)
        (fresh / STATE_FOLDER).mkdir()
        ranks = trainer.rank_count
        digests: dict[str, str] = {}
        for rank, words in enumerate(write_shards(fresh)):
            digests |= dict(zip(map(str, shard_files(rank, ranks)), words.split()))
        index = {name: str(shard_files(number % ranks, ranks)[1]) for number, name in enumerate(trainer.model.weights)}
        (fresh / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n", encoding="utf-8")
        write_state(fresh, state_values(trainer, extra) | {"ranks": ranks}, digests)


def write_shard(trainer: ShardedTrainer, folder: Path) -> str:
    """Write what this rank contributes, and return the digests of both files. Every rank must call it.

    Raises ModelError on every rank if a weight is not finite, OSError or Unavailable on one whose disk fails.
    """
    if not trainer.agree(trainer.model.is_finite()):
        raise ModelError("the weights hold numbers that are not finite; they are not written")
    model: dict[str, NDArray[np.float32]] = {}
    for number, (name, weight) in enumerate(trainer.model.weights.items()):
        tensor = whole(weight.detach())
        if number % trainer.rank_count == trainer.rank:
            model[name] = tensor.cpu().numpy()
    state_file, model_file = shard_files(trainer.rank, trainer.rank_count)
    write_tensors(folder / model_file, model, "bf16")
    write_tensor_state(trainer, folder / state_file)
    return f"{digest_of(folder / state_file)} {digest_of(folder / model_file)}"
