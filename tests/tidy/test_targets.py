"""Every test runs in some target of the Makefile on a fresh checkout.

Targets select by marker: `make test` what is neither slow nor vllm, `make test-slow` what is slow, `make test-vllm`
what is vllm. A test that is skipped because a package is missing runs nowhere if the target that selects it does not
install the package. Such a test states its need by tests/needs.py, which marks it slow; `make test-slow` installs it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.needs import EXTRAS, marks

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]


def name_of(requirement: str) -> str:
    """The module's name, for packages whose module has the name of the distribution."""
    return re.split(r"[\[<>=!~; ]", requirement)[0].replace("-", "_").lower()


# What `make venv` installs: it is there in every target.
ALWAYS = {name_of(found) for found in [*PROJECT["dependencies"], *OPTIONAL["dev"], *OPTIONAL["fast"], "torch", "numba"]}
IN_SLOW = {name for names in EXTRAS.values() for name in names}


def recipes() -> dict[str, tuple[list[str], str]]:
    """By target: what it needs, and what it runs."""
    found = re.findall(r"^([^\s:#=]+): *([^=\n]*)\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    return {target: (needed.split(), recipe) for target, needed, recipe in found}


def run_by(target: str) -> str:
    """All that is run when a target is made."""
    needed, recipe = recipes()[target]
    return "".join(run_by(other) for other in needed if other in recipes()) + recipe


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_slow_tests_need_is_installed_by_their_target(extra: str) -> None:
    assert extra in OPTIONAL
    assert re.search(rf"install .*\.\[{re.escape(extra)}\]", run_by("test-slow")), f"make test-slow lacks [{extra}]"
    assert pytest.mark.slow in marks(extra)


def test_the_targets_select_every_test_by_its_markers() -> None:
    quick, slow = (re.findall(r'-m "([a-z ]+)"', run_by(target)) for target in ("test", "test-slow"))
    assert quick == ["not slow and not vllm"] * 2 and "slow and not vllm" in slow
    assert "-m vllm tests/vllm" in run_by("test-vllm")
    assert "--ignore=tests/e2e" in recipes()["test"][1] and '" tests/e2e ' in recipes()["test"][1]
    assert (ROOT / ".ci" / "run").read_text().count("make check test test-slow") == 1


def test_tests_of_vllm_are_where_their_target_looks() -> None:
    marked = {
        path for path in TESTS if re.search(r"mark\.vllm\b", path.read_text()) and path.name != Path(__file__).name
    }
    assert marked
    assert all(path.is_relative_to(ROOT / "tests" / "vllm") for path in marked)


def functions(tree: ast.AST) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """Each call in a file, with the decorators of the function around it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                yield inner, node.decorator_list


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_that_a_test_cannot_do_without_is_installed_by_its_target(path: Path) -> None:
    if path.name in ("needs.py", Path(__file__).name):
        return
    tree = ast.parse(path.read_text())
    around = {id(node): decorators for node, decorators in functions(tree)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        words = ast.unparse(node)
        if ast.unparse(node.func).endswith("skipif"):
            assert "find_spec" not in words, f"line {node.lineno}: say it by tests.needs, which marks it slow too"
        if ast.unparse(node.func).endswith("importorskip"):
            package = ast.literal_eval(node.args[0]).partition(".")[0]
            assert package in ALWAYS | IN_SLOW, f"line {node.lineno}: no target installs {package}"
            is_test = path.name.startswith("test_")
            is_slow = any("slow" in ast.unparse(mark) for mark in around.get(id(node), []))
            assert package in ALWAYS or is_slow or not is_test, (
                f"line {node.lineno}: {package} is there in test-slow only"
            )
