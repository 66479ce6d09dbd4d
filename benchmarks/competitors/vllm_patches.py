"""vLLM's own way to new weights, inside a rollout engine: mixed into its worker by benchmarks/swap_vllm.py.

Its patch loader takes the numbers that changed in a checkpoint's tensors. What it is given lies ready in memory before
it is timed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from rose.vllm.vllm_weights import RoseWorker


class PatchingWorker(RoseWorker):
    """The agent's methods, and these."""

    def prepare_patches(self, before: str, after: str) -> dict[str, Any]:
        old, new = _tensors(before), _tensors(after)
        self.patches = []
        for name, tensor in new.items():
            flat, shape = tensor.reshape(-1), tuple(tensor.shape)
            index = (flat != old[name].reshape(-1)).nonzero().view(-1)
            self.patches.append(CheckpointWeightPatch(name, shape, tensor.dtype, flat[index], index))
        return {"numbers": sum(len(patch.values) for patch in self.patches)}

    def load_patches(self, is_checked: str) -> dict[str, Any]:
        model = self.model_runner.model  # type: ignore[attr-defined]
        names = load_checkpoint_weight_patches(model, self.patches, validate_unique_indices=is_checked == "yes")
        return {"tensors": len(names)}


def _tensors(folder: str) -> dict[str, Any]:
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    return found
