"""Unsupported versions and the wrong kind of scheduling are refused at start-up."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import rose.vllm as package
from rose.errors import ConfigError
from rose.vllm import supported_versions


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.320.0", "1.0"])
def test_an_unsupported_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=f"vLLM {version} is installed.*0.32.x, 0.33.x"):
        supported_versions.check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.7", "0.33.0"])
def test_supported_versions_are_accepted(version: str) -> None:
    assert supported_versions.check_version(version) is None


def source_of(version: str) -> Path:
    """Return the package of a vLLM release: below ROSE_VLLM_SOURCES, or the installed one. Skips without it."""
    folder = os.environ.get("ROSE_VLLM_SOURCES")
    for unpacked in sorted(Path(folder).glob(f"vllm-{version}*/vllm")) if folder else ():
        return unpacked
    installed = find_spec("vllm")
    if installed is not None and installed.origin is not None and installed_version("vllm").startswith(version):
        return Path(installed.origin).parent
    pytest.skip(f"no source of vLLM {version}: unpack its sdist in a folder and name that in ROSE_VLLM_SOURCES")


@pytest.mark.parametrize("version", supported_versions.SUPPORTED)
def test_every_supported_vllm_has_the_private_names(version: str) -> None:
    assert supported_versions.missing_names(source_of(version)) == []


def test_a_name_that_moved_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("function", "Kind.method", "Kind.attribute", "Kind.field", "imported", "Kind.gone", "gone")
    monkeypatch.setattr(supported_versions, "PRIVATE_NAMES", {"module.py": names, "absent.py": ("any",)})
    (tmp_path / "module.py").write_text(
        "from elsewhere import other as imported\n"
        "def function(): ...\n"
        "class Kind:\n"
        "    field: int = 0\n"
        "    def method(self):\n"
        "        self.attribute = gone = 1\n"
    )
    missing = supported_versions.missing_names(tmp_path)
    assert missing == ["module.py: Kind.gone", "module.py: gone", "absent.py: any"]
    with pytest.raises(ConfigError, match="gone"):
        supported_versions.check_names(tmp_path)


@pytest.mark.parametrize("name", list(package._MODULES))
def test_the_version_is_checked_before_a_scheduler_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("vllm")
    other.__version__ = "0.9.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    with pytest.raises(ConfigError, match=r"vLLM 0\.9\.1 is installed"):
        getattr(package, name)


@pytest.mark.parametrize(
    "name, is_async, wants_async, right",
    [
        ("ServingScheduler", False, True, "AsyncServingScheduler"),
        ("AsyncServingScheduler", True, False, "vllm.ServingScheduler"),
        ("AsyncRolloutScheduler", True, False, "vllm.RolloutScheduler"),
    ],
)
def test_the_wrong_scheduler_names_the_right_one(name: str, is_async: bool, wants_async: bool, right: str) -> None:
    with pytest.raises(ConfigError, match=right):
        supported_versions.check_scheduling(name, is_async=is_async, wants_async=wants_async)
    supported_versions.check_scheduling(name, is_async=is_async, wants_async=is_async)


def test_an_engine_without_chunked_prefill_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunked prefill"):
        supported_versions.check_chunked(False)


def test_only_schedulers_are_found_by_name() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        package.Nonsense  # noqa: B018


def test_only_schedulers_and_weights_need_vllm() -> None:
    for name in ("discovery", "engine_process", "lend_session", "patching", "plugin", "status_writer", "vllm_arbiter"):
        assert importlib.import_module(f"rose.vllm.{name}")
