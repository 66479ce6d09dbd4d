"""Control goes one way and status the other, through two mapped files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.errors import Unavailable
from rose.vllm.control_segment import EngineControl, Status, open_control, open_status


def test_control_and_status_are_read_as_they_were_written(tmp_path: Path) -> None:
    wishes, read_wishes = open_control(tmp_path, create=True), open_control(tmp_path)
    assert read_wishes.read() == (0, None)
    number = wishes.write(EngineControl(tokens=5, sequences=2, until_s=1e12, kv_bytes=None))
    assert read_wishes.read() == (number, EngineControl(5, 2, 1e12))
    state = open_status(tmp_path, create=True)
    state.write(Status(7, done=number, why="é" * 100))
    assert open_status(tmp_path).read()[1] == Status(7, done=number, why="é" * 100)


def test_a_missing_segment_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        open_control(tmp_path / "none")
