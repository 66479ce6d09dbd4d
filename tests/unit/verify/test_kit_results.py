"""Results survive a kill, and a file that is not one of the kit's is refused in words."""

from __future__ import annotations

import pytest
from tests.unit.kit_reports import full_report

from rose.errors import ConfigError
from rose.verify.kit_results import KitReport, StepResult, read_report, read_result, result_path, write_json


def test_a_report_comes_back_as_it_was_written(tmp_path):
    report = full_report()
    write_json(tmp_path / "report.json", report)
    assert read_report(tmp_path / "report.json") == report


def test_a_result_is_found_by_its_step(tmp_path):
    (tmp_path / "steps").mkdir()
    result = StepResult("idle", "passed", seconds=1.0)
    write_json(result_path(tmp_path, "idle"), result)
    assert read_result(result_path(tmp_path, "idle")) == result
    assert read_result(result_path(tmp_path, "decode")) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"step": "x", "outcome": "maybe"}', b"[" * 5000])
def test_another_file_is_refused_in_words(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigError, match="was not written by this kit"):
        read_result(tmp_path / "x")


def test_a_report_of_another_layout_is_refused(tmp_path):
    write_json(tmp_path / "report.json", full_report(layout=99))
    with pytest.raises(ConfigError, match="layout 99"):
        read_report(tmp_path / "report.json")


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(tmp_path / "absent" / "report.json", full_report())


def test_figures_and_results_are_found_by_name():
    report = full_report()
    assert isinstance(report, KitReport)
    assert report.result("idle").figure("TTFT P50").value == pytest.approx(22.0)
    assert report.result("idle").figure("absent") is None and report.result("absent") is None
