"""The Helm chart renders the objects of `rose deploy k8s`, from the same file of values, by Helm itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from tests.needs import needs
from tests.unit.deploy.value_sets import VALUE_SETS, values_of

from rose.deploy.rendering import render

HELM = Path(sysconfig.get_path("scripts")) / "helm"
FOLDER = Path(__file__).parents[3] / "deploy" / "helm"


def make_values() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_values", FOLDER / "make_values.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def helm(tmp_path: Path, values: dict[str, Any], *command: str) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    homes = {f"HELM_{kind}_HOME": str(tmp_path / kind) for kind in ("CACHE", "CONFIG", "DATA")}
    line = [str(HELM), *command, str(FOLDER / "rose"), "-f", str(file)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env=homes)


def by_name(objects: list[Any]) -> dict[tuple[str, str, str], Any]:
    found = {(each["kind"], each["metadata"]["namespace"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


@needs("deploy-tests")
@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_chart_renders_what_the_command_renders(tmp_path: Path, name: str) -> None:
    rendered = helm(tmp_path, VALUE_SETS[name], "template", "any-release")
    assert rendered.returncode == 0, rendered.stderr
    chart = by_name([each for each in yaml.safe_load_all(rendered.stdout) if each])
    command = by_name([each for objects in render(values_of(name)).values() for each in objects])
    assert chart.keys() == command.keys()
    for place, each in command.items():
        assert chart[place] == each


@needs("deploy-tests")
@pytest.mark.parametrize(
    "values, what",
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"port": 80}}, "port"),
        ({"workers": {"memory": "much"}}, "memory"),
        ({"trainer": {"kind": "cron"}}, "kind"),
    ],
)
def test_helm_refuses_wrong_values(tmp_path: Path, values: dict[str, Any], what: str) -> None:
    rendered = helm(tmp_path, values, "template", "any-release")
    assert rendered.returncode != 0
    assert what in rendered.stderr


@needs("deploy-tests")
def test_helm_lint_finds_nothing_to_mend(tmp_path: Path) -> None:
    linted = helm(tmp_path, {}, "lint", "--strict")
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("name", ["values.yaml", "values.schema.json"])
def test_the_charts_values_are_those_of_the_command(name: str) -> None:
    what = "run: python deploy/helm/make_values.py"
    assert (FOLDER / "rose" / name).read_text() == make_values().chart_files()[name], what
