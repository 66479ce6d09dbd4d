"""`rose verify gpu`: what it lists, what it refuses, and what its exit code says."""

from __future__ import annotations

import json

import pytest

from rose.cli import main as cli
from rose.verify.verification_steps import STEPS

COLUMNS = 80


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without GPU, driver and vLLM."""
    monkeypatch.setenv("ROSE_CUDA_DRIVER", str(tmp_path / "absent.so"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROSE_VLLM_PYTHON", str(tmp_path / "python"))
    return tmp_path / "out"


def test_a_dry_run_lists_every_step_with_minutes_and_needs_and_runs_nothing(bare, capsys):
    assert cli.main(["verify", "gpu", "--dry-run", "--out", str(bare)]) == 0
    listed = capsys.readouterr().out
    assert all(f"{step.name:<18} {step.minutes:>4.1f} min" in listed for step in STEPS)
    assert "needs gpu, driver" in listed and "not here: no GPU" in listed and "nothing was run" in listed
    assert max(map(len, listed.splitlines())) <= COLUMNS or str(bare.parent) in listed
    assert not bare.exists()


def test_without_a_gpu_every_step_says_so_and_nothing_is_success(bare, capsys):
    assert cli.main(["verify", "gpu", "--out", str(bare)]) == 1
    results = json.loads((bare / "report.json").read_text())["results"]
    assert [result["step"] for result in results] == [step.name for step in STEPS]
    assert {result["outcome"] for result in results} == {"not run"}
    assert all(result["reason"].startswith("no GPU") for result in results) and results[0]["facts"]["ROSE"]
    shown = capsys.readouterr().out
    assert "report.html" in shown and shown.count("not run: ") == 1
    assert (bare / "report.html").exists() and "no GPU" in (bare / "report.txt").read_text()


def test_a_report_says_nothing_of_where_it_was_made(bare):
    cli.main(["verify", "gpu", "--out", str(bare)])
    assert str(bare.parent) not in (bare / "report.json").read_text()


def test_what_needs_no_gpu_runs_on_a_cpu_device(bare):
    words = ["verify", "gpu", "--out", str(bare), "--device", "cpu:0", "--only", "machine", "--only", "page-calls"]
    assert cli.main(words) == 0
    results = json.loads((bare / "report.json").read_text())["results"]
    assert [result["outcome"] for result in results] == ["passed", "passed"]


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--device", "tpu:0"], "is not a device"),
        (["--only", "xyzzy"], "there is no step `xyzzy`"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(bare, capsys, words, sentence):
    assert cli.main(["verify", "gpu", "--out", str(bare), *words]) == 2
    assert sentence in capsys.readouterr().err and not bare.exists()


def test_a_second_kit_in_one_folder_is_refused(bare, capsys):
    cli.main(["verify", "gpu", "--out", str(bare)])
    assert cli.main(["verify", "gpu", "--out", str(bare)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert cli.main(["verify", "gpu", "--out", str(bare), "--resume"]) == 1  # again, with as little
