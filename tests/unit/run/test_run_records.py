"""Records of a run: lines are read as they were written, and damaged ones are told apart."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from tests.unit.launch_lines import record, step

from rose.run.run_folder import RunFolder
from rose.run.run_records import FinishedRecord, StepRecord, read_records, read_served
from rose.run.run_settings import RunSettings, load_run_settings


@pytest.fixture
def settings(tmp_path) -> RunSettings:
    return replace(load_run_settings(), runs=str(tmp_path), name="it")


def test_a_torn_line_is_skipped(tmp_path):
    (tmp_path / "x").write_bytes(b'{"kind":"finished","step":1}\n{"kind":"unheard of"}\n{"kind":"fini')
    assert read_records(tmp_path / "x") == [FinishedRecord(step=1)]
    (tmp_path / "y").write_bytes(b'{"type":"served","at_s":')
    assert read_served(tmp_path / "y") == []


@pytest.mark.parametrize(
    "line", [b"[]", b"1", b'{"no":"kind"}', b'{"kind":"finished"}', b'{"kind":"finished","step":"1"}']
)
def test_a_whole_line_that_is_no_record_is_refused(tmp_path, line):
    (tmp_path / "x").write_bytes(b'{"kind":"finished","step":1}\n' + line + b"\n")
    with pytest.raises(msgspec.ValidationError):
        read_records(tmp_path / "x")
    assert read_records(tmp_path / "x", is_lenient=True) == [FinishedRecord(step=1)]
    (tmp_path / "y").write_bytes(line + b"\n")
    with pytest.raises(msgspec.ValidationError):
        read_served(tmp_path / "y")


@pytest.mark.parametrize("loss", [1e38, -1.7e308, 0.0, math.nan, math.inf])
def test_any_loss_can_be_read_again(settings, loss):
    folder = RunFolder(settings)
    folder.record(msgspec.structs.replace(record(step(1, 0.0)), loss=loss))
    folder.close()
    [found] = read_records(folder.path / "metrics.jsonl")
    assert isinstance(found, StepRecord) and found.loss == (loss if math.isfinite(loss) else None)
