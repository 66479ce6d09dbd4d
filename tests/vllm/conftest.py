"""What these tests need: an interpreter with vLLM, two tiny models, and a folder of segments of their own.

Starting an engine takes longest of all, so stories share engines. Those that leave a dead one run last.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.engines import PYTHON

from rose.models.presets import write_preset

LAST = ("test_closing_ends_what_is_under_way[vllm]", "test_a_dead_engine_is_unavailable[vllm]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if "tests/vllm/" in str(item.path)]
    others = [item for item in items if "tests/vllm/" not in str(item.path)]
    items[:] = others + sorted(ours, key=_turn)
    for item in ours:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(900))
        if not PYTHON:
            item.add_marker(pytest.mark.skip("ROSE_VLLM_PYTHON names no interpreter; use `make test-vllm`"))


def _turn(item: pytest.Item) -> tuple[str, int]:
    """By file, and in it as written but for those above."""
    if item.name in LAST:
        return str(item.path), 2 + LAST.index(item.name)
    return str(item.path), 1


@pytest.fixture(scope="session", autouse=True)
def own_segments(tmp_path_factory: pytest.TempPathFactory):
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
