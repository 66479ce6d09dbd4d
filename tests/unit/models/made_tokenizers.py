"""Tokenizers of several kinds, made in memory, and folders with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from rose.models.presets import byte_vocabulary, lake_vocabulary
from rose.models.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wohin? 湖 <b>"},
    {"role": "assistant", "content": "<answer>Left</answer>"},
    {"role": "user", "content": "Again."},
]


def wrap(inner: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer("tokenizer.json", inner, {}, None)


def sentencepiece_like(decoder: Any) -> tokenizers.Tokenizer:
    """Pieces that begin with a lower one eighth block for a space, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "é", "▁a", "▁the", "la", "ke", "lake", "�"]
    merges = [("▁", "a"), ("l", "a")]
    vocabulary = {piece: rank for rank, piece in enumerate([*pieces, "l"])}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoder
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens([AddedToken("<think>", special=False)])
    return inner


def llama_decoder() -> Any:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(parts)


def byte_level_merged() -> tokenizers.Tokenizer:
    """Byte-level with merges that cut characters in two, and an added token outside the byte alphabet."""
    alphabet = {character: rank for rank, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ã", "©"), ("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ")]
    vocabulary = alphabet | {left + right: len(alphabet) + rank for rank, (left, right) in enumerate(merges)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    inner.add_tokens([AddedToken("<a b 湖>", special=False, normalized=False)])
    return inner


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bytes": lambda: byte_vocabulary().tokenizer,
    "lake": lambda: lake_vocabulary().tokenizer,
    "byte-level": byte_level_merged,
    "llama": lambda: sentencepiece_like(llama_decoder()),
    "metaspace": lambda: sentencepiece_like(decoders.Metaspace()),
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return wrap(KINDS[kind]())


def write_tokenizer(folder: Path, config: dict[str, Any] | None = None, kind: str = "bytes") -> Path:
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
