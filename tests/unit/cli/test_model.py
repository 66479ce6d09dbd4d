"""`rose model`: make, describe and list models, without loading what it does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rose.cli.main import main


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
        "import rose.models.model_folder, rose.models.presets;"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
