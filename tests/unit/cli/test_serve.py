"""`rose serve`: the demo model, and what a gateway needs."""

from __future__ import annotations

import pytest

from rose.cli import main as cli
from rose.cli import serve


def test_a_demo_takes_no_model(capsys):
    assert cli.main(["serve", "runs/models/mine", "--demo"]) == 2
    assert "--demo serves its own model, not runs/models/mine" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, why",
    [
        (["model", "--gateway", "http://x"], "a gateway needs a rollout model"),
        (["--lend", "model", "--gateway", "127.0.0.1:8002"], "is not an address"),
        (["--lend", "model", "--gateway", "http://127.0.0.1:1"], "there is no token for the gateway"),
        (["model", "--lend", "other", "--lend-mode", "decode"], "decode"),
        (["model", "--port", "99999"], "front.port"),
        ([], "there is nothing to serve"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(words, why, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("ROSE_WORKER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.main(["serve", *words]) == 2
    assert why in capsys.readouterr().err


def test_a_demo_model_is_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = serve._demo_model(None)
    written = (folder / "config.json").stat().st_mtime_ns
    assert serve._demo_model(None) == folder and (folder / "config.json").stat().st_mtime_ns == written
    assert capsys.readouterr().out.count("Making a") == 1
