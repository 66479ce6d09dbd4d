"""What `rose run --dry-run` tells: the processes of the run, from the specifications that start them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rose.cli.main import main
from rose.errors import ConfigError
from rose.run import dry_run
from rose.run.run_settings import load_run_settings


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dry_run, "USABLE", frozenset({0, 1}))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_every_process_of_the_run_has_its_cores(tmp_path):
    plan = dry_run.plan_run(load_run_settings(None, ["steps=3"]))
    cores = {process.role: process.cores for process in plan.processes}
    assert cores == {"trainer": "1", "gateway": "1", "borrowed": "0", "dedicated": "1", "traffic": "1"}
    assert plan.changed == {"steps": 3} and plan.steps == 3
    assert "made first" in plan.rollout_model
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_without_borrowing_serving_lends_nothing():
    plan = dry_run.plan_run(load_run_settings(None, ["serving.is_borrowed=false"]))
    commands = {process.role: process.command for process in plan.processes}
    assert "--lend" not in commands["borrowed"] and "--lend" in commands["dedicated"]


def test_what_would_stop_the_run_stops_the_plan(tmp_path):
    settings = load_run_settings(None, [])
    with pytest.raises(ConfigError, match="core"):
        dry_run.plan_run(replace(settings, serving=replace(settings.serving, device="cpu:7")))
    (tmp_path / "runs" / "here").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds a run already"):
        dry_run.plan_run(replace(settings, name="here"))
    assert dry_run.plan_run(replace(settings, name="here"), is_resumed=True).folder == "runs/here"


def test_the_command_prints_lines_of_80_columns_or_json(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["run", "--dry-run", "--set", "steps=2"]) == 0
    shown = capsys.readouterr().out
    assert "nothing was started" in shown and max(map(len, shown.splitlines())) <= 80
    assert main(["run", "--dry-run", "--json", "--settings", "/dev/null"]) == 0
    assert {"trainer", "gateway"} <= {process["role"] for process in json.loads(capsys.readouterr().out)["processes"]}
