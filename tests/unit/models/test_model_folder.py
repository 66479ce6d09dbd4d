"""A whole folder, checked in one call, and the command that shows it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ModelError
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_preset("frozenlake-1m", tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_end_tokens_of_the_tokenizer_count(folder: Path) -> None:
    for file in ("config.json", "generation_config.json"):
        edit(folder / file, eos_token_id=None)
    loaded = load_model_folder(folder)
    assert loaded.spec.eos_token_ids == loaded.tokenizer.eos_ids == (98,)
    assert loaded.name == "model"


def test_missing_folder_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rose model new --preset qwen3-3m --out"):
        load_model_folder(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is not a folder"):
        load_model_folder(tmp_path / "file")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors is missing"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "half the weights": (lambda f: os.truncate(f / "model.safetensors", 9999), r"model\.safetensors is not a whole"),
    "other shapes": (
        lambda f: edit(f / "config.json", hidden_size=192),
        r"model\.embed_tokens\.weight in model\.safetensors is \(110, 160\), config\.json implies \(110, 192\)",
    ),
    "more layers": (lambda f: edit(f / "config.json", num_hidden_layers=5), r"lack model\.layers\.4\."),
    "fewer layers": (lambda f: edit(f / "config.json", num_hidden_layers=3), r"model\.layers\.3\..* has no place"),
    "other tokenizer": (
        lambda f: _swap_tokenizer(f),
        r"tokenizer\.json makes token ids up to 263, but .*config\.json has vocab_size 110",
    ),
}


def _swap_tokenizer(folder: Path) -> None:
    from rose.models.presets import byte_vocabulary

    byte_vocabulary().tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_the_file(folder: Path, case: str) -> None:
    breaks, message = BROKEN[case]
    breaks(folder)
    with pytest.raises(ModelError, match=message):
        load_model_folder(folder)
