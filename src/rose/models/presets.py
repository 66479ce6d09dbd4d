"""Small models made on the spot: no hub, no download, and the same bytes everywhere for the same seed.

A preset is an architecture, a tokenizer and random weights; `write_preset` leaves an ordinary Hugging Face folder. Two
tokenizers spell any text: one byte by byte, the other by characters and a few words, with `?` for the rest. Weights are
near-normal numbers from integer sums of Philox streams keyed by the tensor's name, so neither numpy's version nor the
machine's mathematics can change a bit. The *plain* scale is what the families were trained from; a tied model of that
scale repeats its last token for ever, so models that are served and measured untrained have the *lively* scale.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rose.errors import ConfigError
from rose.models.files import sibling_name
from rose.models.model_spec import ARCHITECTURES, Family, ModelSpec
from rose.models.rope import Rope
from rose.models.stream import BYTE_OF_CHARACTER
from rose.models.tensors import SINGLE, Shape, expected_tensors, write_tensors

SEED_MAX = 2**64 - 1

END_OF_TEXT, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD = "<|pad|>"
BYTE_SPECIALS = (END_OF_TEXT, CHAT_START, CHAT_END, PAD)
BYTE_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
LAKE_SPECIALS = (END_OF_TEXT, CHAT_START, CHAT_END)
LAKE_WORDS = (
    *("<answer>", "</answer>", "Left", "Right", "Up", "Down"),
    *("user", "assistant", "system", "goal", "hole"),
)
LAKE_CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))

CHATML = """\
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0]['role'] == 'system' -%}
        {{- messages[0]['content'] + '\\n\\n' -}}
    {%- endif -%}
    {{- 'Tools you may call, one JSON object per line:\\n<tools>\\n' -}}
    {%- for tool in tools -%}
        {{- tool | tojson + '\\n' -}}
    {%- endfor -%}
    {{- '</tools>\\nTo call one, say:\\n<tool_call>\\n' -}}
    {{- '{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if not (tools and loop.first and message['role'] == 'system') -%}
        {{- '<|im_start|>' + message['role'] + '\\n' -}}
        {%- if message['content'] is string -%}
            {{- message['content'] -}}
        {%- elif message['content'] -%}
            {%- for part in message['content'] -%}
                {{- part['text'] -}}
            {%- endfor -%}
        {%- endif -%}
        {%- for call in message['tool_calls'] or [] -%}
            {%- if message['content'] or not loop.first -%}
                {{- '\\n' -}}
            {%- endif -%}
            {{- '<tool_call>\\n{"name": ' + (call['function']['name'] | tojson) -}}
            {{- ', "arguments": ' + (call['function']['arguments'] | tojson) + '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

Scale = Literal["plain", "lively"]

PLAIN_STD = 0.02
LIVELY_GAIN = 2.0  # at 1 greedy text loops within ten tokens; at 2 it stays varied and float32 still agrees to 1e-4
FOUR_UNIFORMS_MEAN = 2 * 65535
FOUR_UNIFORMS_STD = math.sqrt((65536**2 - 1) / 3)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and the names of its special tokens."""

    tokenizer: Tokenizer
    pad: str

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def id_of(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None, token
        return token_id

    def config(self, max_context_tokens: int) -> dict[str, Any]:
        """Return the tokenizer_config.json of this tokenizer."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": CHAT_END,
            "pad_token": self.pad,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_context_tokens,
            "chat_template": CHATML,
        }


def byte_vocabulary() -> Vocabulary:
    """Return 256 bytes, each with its own value as id, and eight more tokens: 264."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTE_OF_CHARACTER, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer, BYTE_SPECIALS, BYTE_WORDS, PAD)


def lake_vocabulary() -> Vocabulary:
    """Return newline and printable ASCII, three special tokens and eleven words: 110."""
    tokens = {character: rank for rank, character in enumerate(LAKE_CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return _with_added(tokenizer, LAKE_SPECIALS, LAKE_WORDS, END_OF_TEXT)


def _with_added(tokenizer: Tokenizer, specials: tuple[str, ...], words: tuple[str, ...], pad: str) -> Vocabulary:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in words])
    return Vocabulary(tokenizer, pad)


@dataclass(frozen=True, slots=True)
class Preset:
    """A model that `write_preset` can make."""

    name: str
    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    rope_theta: float
    max_context_tokens: int
    vocabulary: Callable[[], Vocabulary]
    scale: Scale
    summary: str


# Name, family, layers, hidden, heads, kv_heads, head_size, ffn, rope_theta, context, vocabulary, scale, summary.
_TABLE = (
    Preset("frozenlake-1m", "qwen3", 4, 160, 5, 1, 32, 448, 1e6, 4096, lake_vocabulary, "plain", "learns FrozenLake"),
    Preset("qwen3-3m", "qwen3", 4, 256, 4, 2, 64, 768, 1e6, 8192, byte_vocabulary, "lively", "quick start, tests"),
    Preset("qwen2-3m", "qwen2", 4, 256, 4, 2, 64, 768, 1e6, 8192, byte_vocabulary, "lively", "quick start, tests"),
    Preset("llama-3m", "llama", 4, 256, 4, 2, 64, 768, 5e5, 8192, byte_vocabulary, "lively", "quick start, tests"),
    Preset("qwen3-25m", "qwen3", 8, 512, 8, 4, 64, 1536, 1e6, 8192, byte_vocabulary, "lively", "benchmarks"),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _TABLE}


def find_preset(name: str) -> Preset:
    """Return the preset of this name, or raise a ConfigError that names the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"there is no preset {name!r}", hint=f"{hint}there are {', '.join(PRESETS)}")


def preset_spec(preset: Preset) -> ModelSpec:
    """Return what `read_spec` will return for the folder that `write_preset` makes."""
    vocabulary = preset.vocabulary()
    return ModelSpec(
        family=preset.family,
        architecture=next(name for name, family in ARCHITECTURES.items() if family == preset.family),
        layers=preset.layers,
        hidden=preset.hidden,
        heads=preset.heads,
        kv_heads=preset.kv_heads,
        head_size=preset.head_size,
        ffn=preset.ffn,
        vocabulary=vocabulary.size,
        max_context_tokens=preset.max_context_tokens,
        rms_eps=1e-6,
        tied_embeddings=True,
        qk_norm=preset.family == "qwen3",
        qkv_bias=preset.family == "qwen2",
        output_bias=False,
        mlp_bias=False,
        rope=Rope(theta=preset.rope_theta),
        eos_token_ids=(vocabulary.id_of(CHAT_END), vocabulary.id_of(END_OF_TEXT)),
    )


def write_preset(preset: Preset | str, out: Path | str, seed: int = 0, force: bool = False) -> Path:
    """Make a model folder, whole or not at all. An `out` with anything in it is refused unless forced."""
    preset = find_preset(preset) if isinstance(preset, str) else preset
    if not 0 <= seed <= SEED_MAX:
        raise ConfigError(f"the seed must be between 0 and {SEED_MAX}, not {seed}")
    out = Path(out).resolve()
    try:
        _refuse_occupied(out, force)
        fresh = sibling_name(out)
        try:
            fresh.mkdir(parents=True)
            _write_files(preset, fresh, seed)
            _move_into_place(fresh, out)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
    return out


def _write_files(preset: Preset, folder: Path, seed: int) -> None:
    spec, vocabulary = preset_spec(preset), preset.vocabulary()
    special = {
        "bos_token_id": None,
        "eos_token_id": list(spec.eos_token_ids),
        "pad_token_id": vocabulary.id_of(vocabulary.pad),
    }
    _write_json(folder / "config.json", _config(spec) | special)
    _write_json(folder / "generation_config.json", special)
    _write_json(folder / "tokenizer_config.json", vocabulary.config(spec.max_context_tokens))
    vocabulary.tokenizer.save(str(folder / "tokenizer.json"))
    metadata = {"format": "pt", "preset": preset.name, "seed": str(seed)}
    write_tensors(folder / SINGLE, random_weights(spec, preset.scale, f"{preset.name}/{seed}"), "bf16", metadata)


def _config(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a spec, in the form that both old and new versions of transformers read."""
    return {
        "architectures": [spec.architecture],
        "model_type": spec.family,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocabulary,
        "max_position_embeddings": spec.max_context_tokens,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope.theta,
        "hidden_act": "silu",
        "initializer_range": PLAIN_STD,
        "tie_word_embeddings": spec.tied_embeddings,
        "dtype": spec.dtype,
        "torch_dtype": spec.dtype,
        **({"attention_bias": False} if spec.family != "qwen2" else {}),
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refuse_occupied(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; a model needs a folder", hint="give another --out")
    entries = list(out.iterdir()) if out.exists() else []
    if not entries:
        return
    if not force:
        raise ConfigError(f"{out} is not empty", hint="give another --out, or --force to replace the model in it")
    if not (out / "config.json").is_file() or any(entry.is_dir() for entry in entries):
        raise ConfigError(f"{out} is not a plain model folder, so --force does not replace it", hint="remove it first")


def _move_into_place(fresh: Path, out: Path) -> None:
    """Rename the fresh folder, so that it appears whole; an old one that is not empty is renamed away first."""
    if not out.exists():
        fresh.rename(out)
        return
    aside = sibling_name(out)
    out.rename(aside)
    try:
        fresh.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside)


# Random weights


def random_weights(spec: ModelSpec, scale: Scale, salt: str) -> dict[str, NDArray[np.float32]]:
    """Return every tensor of a model; norms are one. The salt selects the random stream."""
    weights = {}
    for name, shape in expected_tensors(spec).items():
        if "norm" in name:
            weights[name] = np.ones(shape, dtype=np.float32)
            continue
        # What adds to the residual stream is scaled down by the number of additions.
        depth = math.sqrt(2 * spec.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        gain = 1.0 if "embed" in name or "bias" in name else LIVELY_GAIN
        std = PLAIN_STD / depth if scale == "plain" else gain / math.sqrt(shape[-1]) / depth
        weights[name] = _random_tensor(f"{salt}/{name}", shape, std)
    return weights


def _random_tensor(key: str, shape: Shape, std: float) -> NDArray[np.float32]:
    digest = hashlib.sha256(key.encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(math.prod(shape))
    sums = np.full(raw.shape, -FOUR_UNIFORMS_MEAN, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        sums += (raw >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.int64)
    return (sums * (std / FOUR_UNIFORMS_STD)).astype(np.float32).reshape(shape)
