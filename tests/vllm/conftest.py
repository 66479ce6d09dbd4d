"""What these tests need: an interpreter with vLLM, two tiny models, and boards of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.engines import PYTHON

from rose.models.presets import write_preset


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/vllm/" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))
            if not PYTHON:
                item.add_marker(pytest.mark.skip("ROSE_VLLM_PYTHON names no interpreter; use `make test-vllm`"))


@pytest.fixture(scope="session", autouse=True)
def own_boards(tmp_path_factory: pytest.TempPathFactory):
    """Not those of whoever else lends on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROSE_BOARDS", str(tmp_path_factory.mktemp("boards")))
        yield


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape: the weights to begin with, and the ones to swap to."""
    folders = [tmp_path_factory.mktemp("models") / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        write_preset("qwen3-3m", folder, seed=seed)
    return folders
