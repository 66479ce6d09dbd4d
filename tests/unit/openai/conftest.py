"""One small model for all tests of this folder, and no wait before a wrong token is refused."""

from __future__ import annotations

import pytest

from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.openai import access


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("qwen3-3m", tmp_path_factory.mktemp("models") / "m", seed=0))


@pytest.fixture(autouse=True)
def no_brake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BRAKE_S", 0.0)
