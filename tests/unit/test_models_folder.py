"""A whole folder, checked in one call, and the command that shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.cli.main import main
from rose.errors import ModelError
from rose.models.folder import load_model_folder
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
    from rose.models.vocabulary import byte_vocabulary

    byte_vocabulary().tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders(folder: Path, case: str) -> None:
    breaks, message = BROKEN[case]
    breaks(folder)
    with pytest.raises(ModelError, match=message):
        load_model_folder(folder)


def test_command_new_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert main(["model", "new", "--preset", "qwen2-3m", "--out", str(out), "--seed", "3"]) == 0
    assert f"next: rose serve {out}" in capsys.readouterr().out
    assert main(["model", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "qwen2 (Qwen2ForCausalLM)",
        "3,217,664, stored as bf16",
        "4 heads, 2 for keys and values, of size 64",
        "8,192 tokens",
        "4,096 bytes per token in fp32",
        "264 tokens, with a chat template",
        "258 <|im_end|>, 256 <|endoftext|>",
    ):
        assert words in shown


def test_command_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "presets"]) == 0
    shown = capsys.readouterr().out
    assert "frozenlake-1m" in shown
    assert "8/4 x 64" in shown


def test_command_errors_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "model")
    assert main(["model", "new", "--preset", "qwen3-3", "--out", out]) == 2
    assert "did you mean qwen3-3m" in capsys.readouterr().err
    assert main(["model", "show", out]) == 2
    assert "rose model new --preset qwen3-3m --out" in capsys.readouterr().err
    (tmp_path / "full").write_text("")
    assert main(["model", "new", "--preset", "qwen3-3m", "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_models_need_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; import rose.cli.model; assert 'numpy' not in sys.modules;"
        "import rose.models.folder, rose.models.presets;"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
