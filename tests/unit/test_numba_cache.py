"""Compiled functions are kept in a folder of their own, and the host program's numba settings stay as they are."""

from __future__ import annotations

import os
from pathlib import Path

import numba
import pytest

from rose.numba_cache import FOLDERS_KEPT, NumbaCache


def package(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "kernels.py").write_text(text)
    return folder


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "rose"


def test_decorating_leaves_the_settings_of_numba_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "the host's own")
    cache = NumbaCache(package(tmp_path / "package", "x = 1"), "test")
    for decorate in (cache.entry, cache.inner, cache.inlined):
        decorate(lambda x: x + 1)
    assert numba.config.CACHE_DIR == "the host's own"  # type: ignore[attr-defined]


def test_importing_the_compiled_packages_leaves_the_settings_as_they_were() -> None:
    import rose.engines.embedded.engine_kernels
    import rose.weights.codec.packing  # noqa: F401

    assert "rose" not in str(numba.config.CACHE_DIR)  # type: ignore[attr-defined]


def test_a_change_of_any_source_takes_another_folder(tmp_path: Path, caches: Path) -> None:
    first = NumbaCache(package(tmp_path / "package", "x = 1"), "test").folder
    second = NumbaCache(package(tmp_path / "package", "x = 2"), "test").folder
    assert first != second and first.parent == second.parent == caches
    assert NumbaCache(package(tmp_path / "package", "x = 1"), "test").folder == first


def test_the_oldest_folders_of_the_same_name_are_removed(tmp_path: Path, caches: Path) -> None:
    for number in range(FOLDERS_KEPT + 3):
        folder = caches / f"test-{number}"
        folder.mkdir(parents=True)
        os.utime(folder, (number, number))
    (caches / "other-1").mkdir()
    assert NumbaCache(package(tmp_path / "package", "x = 1"), "test").folder.parent == caches
    left = {path.name for path in caches.iterdir()}
    assert left == {f"test-{number}" for number in range(3, FOLDERS_KEPT + 3)} | {"other-1"}


def test_the_environment_names_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NumbaCache(package(tmp_path / "package", "x = 1"), "test")
    assert cache.folder != tmp_path
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert cache.folder == tmp_path
