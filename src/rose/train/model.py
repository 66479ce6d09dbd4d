"""The rollout model as the trainer sees it: fp32 weights by their Hugging Face names, and a forward pass with
gradients.

It is written for the three families the engines run and computes what they compute: a trainer whose
log-probabilities are not those of the engine learns from noise. There is no key-value cache, no dropout and no
attention mask. Batches are padded on the right, and attention is causal, so no real token ever sees padding; the
loss does not look at padding either. Without a mask, attention on a CPU is about two and a half times as fast.

Only the tokens the rollout model wrote itself are scored, a small part of a trajectory. What comes after the last
layer's attention is computed for those alone: a fifth less work, and the logits of a big vocabulary fit in memory.

bf16 arithmetic is many times slower than fp32 on CPUs without it, and two threads beside another busy process wait
for each other at every operation. So everything here is fp32, on one thread unless the caller says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from rose.models.spec import ModelSpec, read_spec, rope_frequencies
from rose.models.tensors import Tensors, check, expected_tensors, open_tensors

EMBEDDING = "model.embed_tokens.weight"


def use_threads(threads: int = 1) -> None:
    """How many threads this process computes with; more than one only if it is alone on its cores."""
    torch.set_num_threads(threads)


class CausalModel:
    """One model. `weights` are leaf tensors: an optimiser may change them in place."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor]) -> None:
        assert weights.keys() == expected_tensors(spec).keys()
        self.spec = spec
        self.weights = weights
        frequencies, self._rope_scale = rope_frequencies(spec)
        self._rope_frequencies = torch.from_numpy(frequencies.copy())

    @classmethod
    def load(cls, folder: Path | str) -> CausalModel:
        """From a Hugging Face folder. Raises ModelError."""
        return cls.from_tensors(read_spec(folder), open_tensors(folder))

    @classmethod
    def from_tensors(cls, spec: ModelSpec, tensors: Tensors) -> CausalModel:
        check(tensors, spec)
        names = expected_tensors(spec)
        return cls(spec, {name: torch.tensor(tensors.float32(name)).requires_grad_() for name in names})

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The weights as they are now, to be written; views, not copies."""
        return {name: weight.detach().numpy() for name, weight in self.weights.items()}

    def is_finite(self) -> bool:
        return are_finite(self.weights.values())

    def logits(self, token_ids: Tensor, scored: Tensor) -> Tensor:
        """What the model expects at each scored token: (tokens scored, vocabulary), row by row.

        `token_ids` and `scored` are (batch, length); a first token has nothing before it and is never scored.
        """
        assert not scored[:, 0].any(), "the first token of a sequence has no log-probability"
        spec = self.spec
        before = scored[:, 1:]  # position t predicts token t + 1
        states = functional.embedding(token_ids[:, :-1], self.weights[EMBEDDING])
        rotation = self._rotation(states.shape[1])
        for layer in range(spec.layers):
            states = states + self._attention(layer, states, rotation)
            if layer == spec.layers - 1:
                states = states[before]
            states = states + self._mlp(layer, states)
        states = self._norm(states, "model.norm.weight")
        return functional.linear(states, self.weights[EMBEDDING if spec.tied_embeddings else "lm_head.weight"])

    def logprobs(self, token_ids: Tensor, scored: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability of every scored token, and the entropy (without gradient) of what it was drawn from."""
        everything = functional.log_softmax(self.logits(token_ids, scored) / temperature, dim=-1)
        chosen = everything.gather(1, token_ids[scored][:, None]).squeeze(1)
        with torch.no_grad():
            entropy = -(everything.exp() * everything).sum(-1)
        return chosen, entropy

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
        """(batch, heads, length, head size)"""
        return self._linear(inputs, name).unflatten(-1, (heads, self.spec.head_size)).transpose(1, 2)

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return functional.linear(inputs, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self.weights[name], self.spec.rms_eps)

    def _rotation(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._rope_frequencies
        return angles.cos() * self._rope_scale, angles.sin() * self._rope_scale


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number is infinite or not a number; one pass per tensor, since both survive a sum."""
    return all(bool(torch.isfinite(tensor.detach().sum())) for tensor in tensors)


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions; the halves of a head are the two coordinates."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _repeated(heads: Tensor, times: int) -> Tensor:
    """Every key-value head once per query head that shares it."""
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)
