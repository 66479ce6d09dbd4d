"""Small models made on the spot: no hub, no download, and the same bytes everywhere for the same seed.

A preset is an architecture, a tokenizer and random weights; what `write_preset` leaves is an ordinary Hugging
Face folder, which transformers loads offline.
"""

from __future__ import annotations

import difflib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.models.files import sibling_name
from rose.models.initial import PLAIN_STD, Scale, random_weights
from rose.models.rope import Rope
from rose.models.spec import ARCHITECTURES, Family, ModelSpec
from rose.models.tensors import SINGLE
from rose.models.vocabulary import CHAT_END, END_OF_TEXT, Vocabulary, byte_vocabulary, lake_vocabulary
from rose.models.writer import write_tensors

SEED_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Preset:
    """One row of the table. `summary` says what it is for."""

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
    """The preset of this name, or a ConfigError that names the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(f"there is no preset {name!r}", hint=f"{hint}there are {', '.join(PRESETS)}")


def preset_spec(preset: Preset) -> ModelSpec:
    """What `read_spec` will say of the folder that `write_preset` makes."""
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
        _write_whole(preset, out, seed)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
    return out


def _write_whole(preset: Preset, out: Path, seed: int) -> None:
    fresh = sibling_name(out)
    try:
        fresh.mkdir(parents=True)
        _write_files(preset, fresh, seed)
        _move_into_place(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


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
    """The config.json of a spec, in the form that both old and new versions of transformers read."""
    found: dict[str, Any] = {
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
    }
    if spec.family != "qwen2":
        found["attention_bias"] = False
    return found


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
    """Rename is what makes a folder appear whole; an old one steps aside first, since it is not empty."""
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
