"""What these tests need: an interpreter with SGLang, two tiny models, and a folder of segments of their own.

Starting an engine takes longest of all, so stories share engines. Stories that leave a dead one run last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sglang.engines import PYTHON

from rose.models.presets import write_preset
from rose.vllm.discovery import FOLDER_VARIABLE

LAST = ("test_closing_ends_what_is_under_way[sglang]", "test_a_dead_engine_is_unavailable[sglang]")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if "tests/sglang/" in str(item.path)]
    others = [item for item in items if "tests/sglang/" not in str(item.path)]
    items[:] = others + sorted(ours, key=_turn)
    for item in ours:
        item.add_marker(pytest.mark.sglang)
        item.add_marker(pytest.mark.timeout(900))
        if not PYTHON:
            item.add_marker(pytest.mark.skip("ROSE_SGLANG_PYTHON names no interpreter; use `make test-sglang`"))


def _turn(item: pytest.Item) -> tuple[str, int]:
    """Return the place of a test: by file, and in it as written, but `LAST` at its end."""
    return str(item.path), 2 + LAST.index(item.name) if item.name in LAST else 1


@pytest.fixture(scope="session", autouse=True)
def own_segments() -> Iterator[None]:
    """Use a folder of segments apart from others on this machine; a socket's path is short."""
    with tempfile.TemporaryDirectory(prefix="rose-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, folder)
        yield


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape: the weights to begin with, and the ones to swap to."""
    folders = [tmp_path_factory.mktemp("models") / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        write_preset("qwen3-3m", folder, seed=seed)
    return folders
