"""Summary of a run: its files, and the lines for the terminal."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from tests.unit.launch_lines import run_lines, served, summary_of

from rose.cost.bill import CostSettings
from rose.run.run_folder import RunFolder
from rose.run.run_records import Summary
from rose.run.run_settings import RunSettings, load_run_settings
from rose.run.summary import priced_by, sum_up, words_of


@pytest.fixture
def settings(tmp_path) -> RunSettings:
    return replace(load_run_settings(), runs=str(tmp_path), name="it")


def test_a_run_that_was_stopped_at_once_is_summed_up(settings):
    folder = RunFolder(settings)
    words = list(sum_up(folder))
    folder.close()
    assert words[0] == "no step was finished" and "report.html" in words[-1]
    assert json.loads((folder.path / "summary.json").read_text())["steps"] == 0


def test_a_summary_in_lines_for_the_terminal():
    summary = msgspec.convert(summary_of(run_lines(), [served(100 + second / 2) for second in range(80)]), Summary)
    lines = list(words_of(summary))
    assert lines[0] == "held-out success: 9.0% before, 60.0% after 8 steps"
    assert any(line.startswith("with the borrowed device: rollouts x ") for line in lines)
    assert any(line.startswith("cost: USD ") and "without borrowing" in line for line in lines)
    assert lines[-1] == "trajectories lost: 0, counted twice: 0"


def test_prices_are_those_of_the_settings_and_else_the_defaults(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("cost: {unknown_price: 3.0}\nserving: {lend: {headroom_share: 0.25}}\n")
    assert priced_by(path) == (CostSettings(), 0.25)
    path.write_text("")
    assert priced_by(path) == (CostSettings(), 0.0)
