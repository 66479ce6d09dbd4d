"""Fixtures of the gateway's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "qwen3-3m", seed=0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a ledger, in a folder that does not exist yet."""
    return tmp_path / "run" / "ledger.sqlite"
