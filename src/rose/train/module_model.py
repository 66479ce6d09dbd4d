"""Models to train that are torch modules: on several ranks, on GPUs, in bf16, or with transformers' own arithmetic.

`CausalModel` alone stays what one rank trains in fp32 on a CPU. Here the same arithmetic, or that of transformers, is a
tree of modules whose layers FSDP2 gathers one at a time: `fully_shard` cuts every weight by rows over the ranks, and
with it gradients and moments. A model begins on no device; each rank then reads its own rows from the folder, so no
rank ever holds all weights. Gradients are summed, not averaged: the loss of a rank is its part of one sum.

In bf16 only the arithmetic is bf16: weights, gradients between ranks and moments stay fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rose.errors import ConfigError, ModelError
from rose.models.model_spec import ModelSpec, read_spec
from rose.models.tensors import check, expected_tensors, open_tensors
from rose.train.policy_model import CausalModel, are_finite, logprobs_of
from rose.train.train_settings import TrainSettings


def own_part(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor that this rank holds: all of them unless it is sharded."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]
    return local


def whole(tensor: Tensor) -> Tensor:
    """Return all rows; of a sharded tensor every rank must ask."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]
    return full


def own_rows(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the range of rows of a tensor that a rank holds, as FSDP2 deals them out."""
    run = -(-rows // ranks)
    return min(rank * run, rows), min((rank + 1) * run, rows)


class ModuleModel:
    """A module as a trainer wants it. `weights` are its parameters by Hugging Face names; sharded ones are DTensors."""

    def __init__(self, folder: Path | str, settings: TrainSettings, mesh: Any = None) -> None:
        """Read the model of a folder; with a mesh each rank reads its own rows. Raises ConfigError, ModelError."""
        self._source, self._settings, self._mesh = Path(folder), settings, mesh
        self.spec = read_spec(folder)
        self._device = _device(settings)
        with torch.device("meta"):
            self._root: nn.Module = hf_module(self._source) if settings.model == "hf" else OwnModule(self.spec)
        if settings.gradient_checkpointing:
            self._root.checkpoint_layers()  # type: ignore[operator]
        if mesh is not None:
            _shard(self._root, mesh, settings)
        self._root.to_empty(device=self._device)
        self._root.fill_buffers(self._device)  # type: ignore[operator]
        self.weights: Mapping[str, Tensor] = dict(self._root.named_weights())  # type: ignore[operator]
        self._read_weights()

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the weights; every rank must ask, and gets all of them."""
        return {name: whole(weight).detach().cpu().numpy() for name, weight in self.weights.items()}

    def is_finite(self) -> bool:
        """Return whether all numbers are finite that this rank holds."""
        return are_finite(own_part(weight) for weight in self.weights.values())

    def frozen_copy(self) -> ModuleModel:
        """Return another such model with these weights, without gradients."""
        copy = ModuleModel(self._source, self._settings, self._mesh)
        with torch.no_grad():
            for name, weight in copy.weights.items():
                weight.requires_grad_(False)
                weight.copy_(self.weights[name])
        return copy

    def logprobs(self, token_ids: Tensor, scored: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the log-probability of every scored token, and the entropy of its distribution."""
        assert not scored[:, 0].any(), "the first token of a sequence has no log-probability"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._settings.precision == "bf16"):
            logits = self._root(token_ids, scored)
        return logprobs_of(logits.float(), token_ids[scored], temperature)

    def _read_weights(self) -> None:
        tensors = open_tensors(self._source)
        check(tensors, self.spec)
        expected = expected_tensors(self.spec)
        shapes = {name: tuple(weight.shape) for name, weight in self.weights.items()}
        if shapes != expected:
            odd = sorted(name for name in shapes.keys() | expected if shapes.get(name) != expected.get(name))
            raise ModelError(
                f"transformers has another {odd[0]} than {self._source} implies", hint="set train.model=own"
            )
        ranks, rank = (self._mesh.size(), self._mesh.get_local_rank()) if self._mesh is not None else (1, 0)
        with torch.no_grad():
            for name, weight in self.weights.items():
                first, last = own_rows(weight.shape[0], rank, ranks)
                own_part(weight).copy_(torch.tensor(tensors.float32(name)[first:last]))


def _device(settings: TrainSettings) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is cuda, and torch finds no GPU here", hint="set train.device=cpu")
    return torch.device(settings.device)


def _shard(root: nn.Module, mesh: Any, settings: TrainSettings) -> None:
    """Cut the weights over the ranks. The root has what is outside of the layers, which may be one tied tensor."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if settings.precision == "bf16":  # gathered in bf16: autocast would keep a cast copy of every layer
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in root.layers():  # type: ignore[operator]
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # the losses of the ranks add up
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to divide by one


class LiveWeights(Mapping[str, Tensor]):
    """The parameters of modules as they are at the moment: gathered while their layer computes, else sharded."""

    def __init__(self, places: Mapping[str, tuple[nn.Module, str]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        module, attribute = self._places[name]
        weight = module._parameters[attribute]
        assert weight is not None
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class OwnModule(nn.Module):
    """The arithmetic of `CausalModel`, with the weights of a layer in a module of their own."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self._blocks = nn.ModuleList(_OwnLayer(index) for index in range(spec.layers))
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for name, shape in expected_tensors(spec).items():
            parts = name.split(".")
            owner = self._blocks[int(parts[2])] if parts[1] == "layers" else self
            attribute = "/".join(parts)
            owner.register_parameter(attribute, nn.Parameter(torch.empty(shape)))
            self._places[name] = owner, attribute
        self._model = CausalModel(spec, LiveWeights(self._places))
        self._model.run_layer = lambda index, *states: self._blocks[index](self._model, *states)

    def forward(self, token_ids: Tensor, scored: Tensor) -> Tensor:
        return self._model.logits(token_ids, scored)

    def layers(self) -> list[nn.Module]:
        return list(self._blocks)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(LiveWeights(self._places).items())

    def checkpoint_layers(self) -> None:
        for block in self._blocks:
            assert isinstance(block, _OwnLayer)
            block.is_checkpointed = True

    def fill_buffers(self, device: torch.device) -> None:
        """Do nothing: there are no buffers."""


class _OwnLayer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self._index, self.is_checkpointed = index, False

    def forward(
        self, model: CausalModel, states: Tensor, rotation: tuple[Tensor, Tensor], before: Tensor | None
    ) -> Tensor:
        if self.is_checkpointed and torch.is_grad_enabled():
            found: Tensor = checkpoint(model.layer, self._index, states, rotation, before, use_reentrant=False)
            return found
        return model.layer(self._index, states, rotation, before)


def hf_module(folder: Path) -> nn.Module:
    """Return transformers' implementation of the model in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.attention_dropout = 0.0  # log-probabilities are those that the engine sampled by
    return HfModule(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa"))


class HfModule(nn.Module):
    """A causal model of transformers; the head is computed for scored tokens only."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        inner.model.embed_tokens.padding_idx = None  # that token is read like any other; padding has no gradient here
        self._is_tied = bool(inner.config.tie_word_embeddings)
        if self._is_tied:
            del inner.lm_head  # neither leaving the meta device nor sharding keeps two names of one tensor together

    def forward(self, token_ids: Tensor, scored: Tensor) -> Tensor:
        states = self.inner.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
        head = self.inner.model.embed_tokens if self._is_tied else self.inner.lm_head
        return nn.functional.linear(states[scored[:, 1:]], head.weight)

    def layers(self) -> list[nn.Module]:
        return list(self.inner.model.layers)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.inner.named_parameters())

    def checkpoint_layers(self) -> None:
        self.inner.train()
        self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def fill_buffers(self, device: torch.device) -> None:
        """Compute the rotation frequencies, which are in no file."""
        rotary = self.inner.model.rotary_emb
        self.inner.model.rotary_emb = type(rotary)(config=self.inner.config).to(device)
