"""The rollout model of the trainer: fp32 weights by their Hugging Face names, and a forward pass with gradients.

It computes what the engines compute: a trainer with other log-probabilities learns from noise. Batches are padded on
the right and attention is causal, so no mask is needed, which makes attention on a CPU 2.5 times as fast. Everything
after the last layer's attention is computed for scored tokens only: a fifth less work, and the logits of a big
vocabulary fit in memory. bf16 is many times slower than fp32 on CPUs without it, and two threads beside another busy
process wait for each other at every operation; so everything is fp32, on one thread unless the caller says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from rose.models.model_spec import ModelSpec, read_spec
from rose.models.rope import rope_frequencies
from rose.models.tensors import check, expected_tensors, open_tensors

EMBEDDING = "model.embed_tokens.weight"


def use_threads(threads: int = 1) -> None:
    """Set the threads this process computes with; more than one only if it is alone on its cores."""
    torch.set_num_threads(threads)


class PolicyModel(Protocol):
    """What a trainer asks of the model it trains."""

    spec: ModelSpec
    weights: Mapping[str, Tensor]

    def parameters(self) -> list[Tensor]: ...
    def arrays(self) -> dict[str, NDArray[np.float32]]: ...
    def is_finite(self) -> bool: ...
    def frozen_copy(self) -> PolicyModel: ...
    def logprobs(self, token_ids: Tensor, scored: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]: ...


class CausalModel:
    """A model whose `weights` are leaf tensors: an optimiser may change them in place."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        assert weights.keys() == expected_tensors(spec).keys()
        self.spec = spec
        self.weights = weights
        self.run_layer = self.layer  # a module that gathers weights layer by layer puts its own here
        frequencies, self._rope_scale = rope_frequencies(spec.rope, spec.head_size)
        self._rope_frequencies = torch.from_numpy(frequencies.copy())

    @classmethod
    def load(cls, folder: Path | str) -> CausalModel:
        """Return the model of a Hugging Face folder. Raises ModelError."""
        spec, tensors = read_spec(folder), open_tensors(folder)
        check(tensors, spec)
        names = expected_tensors(spec)
        return cls(spec, {name: torch.tensor(tensors.float32(name)).requires_grad_() for name in names})

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the current weights as views, not copies."""
        return {name: weight.detach().numpy() for name, weight in self.weights.items()}

    def is_finite(self) -> bool:
        return are_finite(self.weights.values())

    def logits(self, token_ids: Tensor, scored: Tensor) -> Tensor:
        """Return the logits of each scored token: (tokens scored, vocabulary), row by row.

        `token_ids` and `scored` are (batch, length); a first token has nothing before it and is never scored.
        """
        assert not scored[:, 0].any(), "the first token of a sequence has no log-probability"
        spec = self.spec
        before = scored[:, 1:]  # position t predicts token t + 1
        states = functional.embedding(token_ids[:, :-1], self.weights[EMBEDDING])
        positions = torch.arange(states.shape[1], dtype=torch.float32, device=states.device)
        angles = positions[:, None] * self._rope_frequencies.to(states.device)
        rotation = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        for layer in range(spec.layers):
            states = self.run_layer(layer, states, rotation, before if layer == spec.layers - 1 else None)
        states = self._norm(states, "model.norm.weight")
        return functional.linear(states, self.weights[EMBEDDING if spec.tied_embeddings else "lm_head.weight"])

    def logprobs(self, token_ids: Tensor, scored: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the log-probability of every scored token, and the entropy (without gradient) of its distribution."""
        return logprobs_of(self.logits(token_ids, scored), token_ids[scored], temperature)

    def layer(self, layer: int, states: Tensor, rotation: tuple[Tensor, Tensor], before: Tensor | None) -> Tensor:
        """Return the states behind a layer; of the last one only those that `before` selects."""
        states = states + self._attention(layer, states, rotation)
        if before is not None:
            states = states[before]
        return states + self._mlp(layer, states)

    def frozen_copy(self) -> CausalModel:
        """Return the model as it is now, without gradients."""
        return CausalModel(self.spec, {name: weight.detach().clone() for name, weight in self.weights.items()})

    def _attention(self, layer: int, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        spec, prefix = self.spec, f"model.layers.{layer}.self_attn."
        inputs = self._norm(states, f"model.layers.{layer}.input_layernorm.weight")
        queries = self._heads(inputs, prefix + "q_proj", spec.heads)
        keys = self._heads(inputs, prefix + "k_proj", spec.kv_heads)
        values = self._heads(inputs, prefix + "v_proj", spec.kv_heads)
        if spec.qk_norm:
            queries = self._norm(queries, prefix + "q_norm.weight")
            keys = self._norm(keys, prefix + "k_norm.weight")
        shared = spec.heads // spec.kv_heads
        mixed = functional.scaled_dot_product_attention(
            _rotated(queries, rotation),
            _repeated(_rotated(keys, rotation), shared),
            _repeated(values, shared),
            is_causal=True,
        )
        return self._linear(mixed.transpose(1, 2).flatten(2), prefix + "o_proj")

    def _mlp(self, layer: int, states: Tensor) -> Tensor:
        inputs = self._norm(states, f"model.layers.{layer}.post_attention_layernorm.weight")
        prefix = f"model.layers.{layer}.mlp."
        gate = functional.silu(self._linear(inputs, prefix + "gate_proj"))
        return self._linear(gate * self._linear(inputs, prefix + "up_proj"), prefix + "down_proj")

    def _heads(self, inputs: Tensor, name: str, heads: int) -> Tensor:
        """Return (batch, heads, length, head size)."""
        return self._linear(inputs, name).unflatten(-1, (heads, self.spec.head_size)).transpose(1, 2)

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return functional.linear(inputs, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self.weights[name].to(states.dtype), self.spec.rms_eps)


def logprobs_of(logits: Tensor, chosen_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each row's chosen token, and the entropy (without gradient) of the row."""
    everything = functional.log_softmax(logits / temperature, dim=-1)
    chosen = everything.gather(1, chosen_ids[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(everything.exp() * everything).sum(-1)
    return chosen, entropy


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all numbers are finite; one pass per tensor, since infinity and NaN survive a sum."""
    return all(bool(torch.isfinite(tensor.detach().sum())) for tensor in tensors)


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return heads rotated by position; the halves of a head are the two coordinates."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _repeated(heads: Tensor, times: int) -> Tensor:
    """Return every key-value head once per query head that shares it."""
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)
