"""The shape of a model, read from the config.json of a Hugging Face folder.

Three families are supported: Qwen3 normalises queries and keys per head, Qwen2 has biases on queries, keys and values,
Llama may have biases everywhere. What would make the engine compute something else than transformers does (sliding
windows, partial rotation, another activation, quantised weights) is refused here, by name, before a weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from rose.errors import ModelError
from rose.models.files import Keys, read_object
from rose.models.rope import Rope, read_rope

Family = Literal["qwen3", "qwen2", "llama"]
ARCHITECTURES: dict[str, Family] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}

QWEN3_HEAD_SIZE = 128  # as in transformers, for a config.json without head_dim; other families divide hidden by heads


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of one model. Linear weights are stored (out, in), as torch does."""

    family: Family
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    max_context_tokens: int
    rms_eps: float
    tied_embeddings: bool
    qk_norm: bool  # RMS norm per head on queries and keys, before the rotation
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    rope: Rope
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"

    @property
    def kv_values_per_token(self) -> int:
        """Return how many numbers the KV cache holds for one token, in all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_size


def read_spec(folder: Path | str) -> ModelSpec:
    """Return the spec of a model folder. End tokens come from generation_config.json too, if it exists."""
    path = Path(folder) / "config.json"
    config = Keys(str(path), read_object(path))
    architecture = _read_architecture(config)
    family = ARCHITECTURES[architecture]
    _refuse_unsupported(config)
    hidden, heads, kv_heads, head_size = _read_attention(config, family)
    context_tokens = config.whole("max_position_embeddings")
    vocabulary = config.whole("vocab_size")
    eos_token_ids = _token_ids(config, "eos_token_id", vocabulary)
    generation = Path(folder) / "generation_config.json"
    if generation.exists():
        eos_token_ids += _token_ids(Keys(str(generation), read_object(generation)), "eos_token_id", vocabulary)
    attention_bias = config.flag("attention_bias", False) if family != "qwen2" else False
    return ModelSpec(
        family=family,
        architecture=architecture,
        layers=config.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        ffn=config.whole("intermediate_size"),
        vocabulary=vocabulary,
        max_context_tokens=context_tokens,
        rms_eps=config.number("rms_norm_eps", 1e-6),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False) if family == "llama" else False,
        rope=read_rope(config, context_tokens),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        bos_token_id=next(iter(_token_ids(config, "bos_token_id", vocabulary)), None),
        dtype=config.text("dtype" if "dtype" in config else "torch_dtype", "float32"),
    )


def _read_architecture(config: Keys) -> str:
    named = config.get("architectures", [])
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise config.complaint("architectures", "must be a list of strings")
    model_type = "" if named else config.text("model_type", "")
    by_type = [name for name, family in ARCHITECTURES.items() if family == model_type]
    supported = [cast(str, name) for name in named if name in ARCHITECTURES] if named else by_type
    if supported:
        return supported[0]
    if named:
        what = f"architecture {', '.join(named)}"
    else:
        what = f"model_type {model_type!r}" if model_type else "no architecture"
    raise ModelError(
        f"{config.file} names {what}, which the embedded engine does not run",
        hint=f"use a model of one of: {', '.join(ARCHITECTURES)}",
    )


def _refuse_unsupported(config: Keys) -> None:
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.complaint("hidden_act", f"is {activation!r}; only silu is supported")
    if config.flag("use_sliding_window", False):
        raise config.complaint("use_sliding_window", "is true; sliding window attention is not supported")
    kinds = config.get("layer_types", [])
    if not isinstance(kinds, list):
        raise config.complaint("layer_types", "must be a list")
    for kind in kinds:
        if kind != "full_attention":
            raise config.complaint("layer_types", f"names {kind!r}; only full_attention is supported")
    if "quantization_config" in config:
        raise config.complaint("quantization_config", "is set; quantised weights are not supported")


def _read_attention(config: Keys, family: Family) -> tuple[int, int, int, int]:
    """Return hidden, heads, kv_heads and head_size."""
    hidden = config.whole("hidden_size")
    heads = config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        wrong = f"({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        raise config.complaint("num_attention_heads", wrong)
    if "head_dim" not in config and family != "qwen3" and hidden % heads:
        raise config.complaint("hidden_size", f"({hidden}) must be a multiple of num_attention_heads ({heads})")
    head_size = config.whole("head_dim", QWEN3_HEAD_SIZE if family == "qwen3" else hidden // heads)
    if head_size % 2:
        raise config.complaint("head_dim", f"must be even for rotary positions, not {head_size}")
    return hidden, heads, kv_heads, head_size


def _token_ids(keys: Keys, key: str, vocabulary: int) -> list[int]:
    value = keys.get(key, [])
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise keys.complaint(key, "must be a token id or a list of them")
        if not 0 <= token_id < vocabulary:
            raise keys.complaint(key, f"names token {token_id}, outside the vocabulary of {vocabulary}")
    return ids
