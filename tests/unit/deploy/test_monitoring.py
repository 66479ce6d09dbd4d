"""The dashboards and alert rules of deploy/: written from one list, with metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.deploy.test_rendering import metrics_of_the_sources

from rose.deploy.cluster_policies import ALERTS

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARDS = ["owner", "training"]
MAKER = DEPLOY / "prometheus" / "make_monitoring.py"


@pytest.fixture(scope="module")
def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_monitoring", MAKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_their_program_writes(maker: Any) -> None:
    for path, text in maker.files().items():
        assert path.read_text() == text, f"run: python {MAKER.relative_to(DEPLOY.parent)}"


def test_the_rules_are_those_of_the_chart_and_of_rose_deploy() -> None:
    [group] = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"]
    found = {rule["alert"]: (rule["expr"], rule["annotations"]["summary"]) for rule in group["rules"]}
    assert found == ALERTS
    template = (DEPLOY / "helm" / "rose" / "templates" / "monitoring.yaml").read_text()
    assert re.findall(r"alert: (\w+)", template) == list(ALERTS)
    assert all(
        f"expr: {expression}\n" in template and f": {summary}\n" in template for expression, summary in found.values()
    )


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_show_metrics_that_exist(name: str) -> None:
    page = json.loads((DEPLOY / "grafana" / f"{name}.json").read_text())
    queries = [target["expr"] for panel in page["panels"] for target in panel["targets"]]
    used = {found for query in queries for found in re.findall(r"(?:rose_|vllm:)[a-z_]+", query)}
    known = metrics_of_the_sources()
    known |= {f"vllm:{found}" for found in histograms()} | {f"vllm:{found}_bucket" for found in histograms()}
    known |= {f"{found}_bucket" for found in known}
    assert len(used) >= 8 and used <= known, used - known
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in page["panels"]}) == len(page["panels"])


def histograms() -> list[str]:
    source = (DEPLOY.parent / "src" / "rose" / "openai" / "http_metrics.py").read_text()
    return re.findall(r'_histogram\("([a-z_]+)"', source)


def test_the_example_of_scraping_names_files_of_tokens_only() -> None:
    page = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yaml").read_text())
    assert {job["job_name"] for job in page["scrape_configs"]} == {"rose-gateway", "rose-devices", "rose-lend", "vllm"}
    assert "credentials:" not in (DEPLOY / "prometheus" / "scrape.yaml").read_text()
