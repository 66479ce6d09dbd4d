"""The paths that ARCHITECTURE.md follows through the code exist, step by step."""

from __future__ import annotations

import re

import pytest
from tests.tidy.counts import PACKAGE, ROOT, length_of, names_in, paths, settings_without_a_page


def test_every_path_of_the_page_is_read() -> None:
    assert list(paths()) == ["A serving request", "A rollout turn", "A version of the weights"]


@pytest.mark.parametrize("path", list(paths()))
def test_every_step_of_a_path_exists(path: str) -> None:
    steps = paths()[path]
    assert len(steps) >= 10
    assert [f"{module}: {name}" for module, name in steps if name not in names_in(module)] == []


def test_a_path_is_counted_by_files_and_changes_of_room() -> None:
    assert length_of(paths()["A serving request"]).endswith("changes of room")


def test_every_setting_has_its_page() -> None:
    assert settings_without_a_page() == 0


def test_every_module_and_package_of_the_listing_exists() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    listing = page.partition("## Parts")[2].partition("```")[2].partition("```")[0]
    modules = set(re.findall(r"(?<![\w*])([a-z]\w*\.py)\b", listing))
    assert len(modules) > 100
    assert modules - {path.name for path in PACKAGE.rglob("*.py")} == set()
    packages = re.findall(r"^  ([a-z]+)/", listing, re.MULTILINE)
    assert sorted(packages) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
