"""Every test runs in some target of the Makefile on a fresh checkout.

Targets select by marker: `make test` what is neither slow nor of another engine, `make test-slow` what is slow and not
long, `make test-long` what is long, `make test-vllm` and `make test-sglang` what is of that engine. A test that is
skipped because a package is missing runs nowhere if the target that selects it does not install the package. Such a
test states its need by tests/needs.py, which marks it slow; `make test-slow` installs it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import pytest_make_parametrize_id
from tests.needs import EXTRAS, marks

import rose
from rose.deploy.deploy_values import ImageValues

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL: dict[str, list[str]] = PROJECT["optional-dependencies"]


def name_of(requirement: str) -> str:
    """The module's name, for packages whose module has the name of the distribution."""
    return re.split(r"[\[<>=!~; ]", requirement)[0].replace("-", "_").lower()


# What `make dev` installs: it is there in every target that tests.
ALWAYS = {name_of(found) for found in [*PROJECT["dependencies"], *OPTIONAL["dev"], *OPTIONAL["fast"], "torch", "numba"]}
ENGINES = ("vllm", "sglang")
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
    assert (
        quick == ["not slow and not vllm and not sglang"] * 2
        and "slow and not long and not vllm and not sglang" in slow
    )
    assert "-m long " in run_by("test-long") and "test-long" in recipes()["test-all"][0]
    for engine in ENGINES:
        assert f"-m {engine} tests/{engine}" in run_by(f"test-{engine}")
    assert "--ignore=tests/integration" in recipes()["test"][1] and '" tests/integration ' in recipes()["test"][1]
    assert (ROOT / ".ci" / "run").read_text().count("make check test test-slow") == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_tests_of_an_engine_are_where_their_target_looks(engine: str) -> None:
    mark = re.compile(rf"mark\.{engine}\b")
    marked = {path for path in TESTS if mark.search(path.read_text()) and path.name != Path(__file__).name}
    assert marked
    assert all(path.is_relative_to(ROOT / "tests" / engine) for path in marked)


def test_tests_on_ray_run_in_their_target() -> None:
    marked = {path for path in TESTS if re.search(r"mark\.ray\b", path.read_text())} - {Path(__file__)}
    assert marked == {ROOT / "tests" / "integration" / "test_run_ray.py"}
    assert "-m ray tests/integration/test_run_ray.py" in run_by("test-ray") and ".[ray,dev,fast]" in run_by("venv-ray")


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


def test_names_of_tests_hold_no_bytes() -> None:
    """Workers of one run collect apart, and the header that gzip writes has the time in it."""
    assert pytest_make_parametrize_id(b"\x1f\x8b", "body") == "body"
    assert pytest_make_parametrize_id("text", "body") is None


def test_the_workflow_of_the_forge_runs_what_has_to_pass() -> None:
    workflow: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in commands and "make test-install" in commands and "test-install" in recipes()
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem)
def test_issue_templates_have_a_name_and_questions(path: Path) -> None:
    template: dict[str, Any] = yaml.safe_load(path.read_text())
    assert template["name"] and template["description"] and any("id" in part for part in template["body"])


def test_users_get_no_development_tools_and_checks_have_them() -> None:
    assert "[dev" not in run_by("run") and "[dev" not in run_by("venv")
    for target in ("check", "test", "test-slow", "test-long", "tidy", "format", "bench", "docs"):
        assert ".[dev,fast]" in run_by(target), target


def test_the_version_is_the_same_everywhere() -> None:
    chart: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "helm" / "rose" / "Chart.yaml").read_text())
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = {PROJECT["version"], chart["version"], chart["appVersion"], heading and heading[1]}
    versions |= {ImageValues().tag.removesuffix("-cuda")}
    assert versions == {rose.__version__}
