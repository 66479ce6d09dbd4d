"""A run in TensorBoard: which lines become curves, and what is said where TensorBoard is not."""

from __future__ import annotations

import importlib.util
import sys
import types
from types import SimpleNamespace

import pytest
from tests.needs import needs
from tests.unit.launch_lines import record, run_lines, step

from rose.errors import ConfigError
from rose.run import tracking
from rose.run.tracking import TrackingSettings, open_tracker, scalars

ON = TrackingSettings(tensorboard=True)


class Value(SimpleNamespace):
    pass


class Summary(SimpleNamespace):
    Value = Value


class EventFileWriter:
    """In the place of TensorBoard's."""

    def __init__(self, folder):
        self.folder, self.events, self.is_closed = folder, [], False

    def add_event(self, event):
        self.events.append(event)

    def close(self):
        self.is_closed = True


@pytest.fixture
def tensorboard(monkeypatch):
    parts = {
        "tensorboard.compat.proto.event_pb2": {"Event": SimpleNamespace},
        "tensorboard.compat.proto.summary_pb2": {"Summary": Summary},
        "tensorboard.summary.writer.event_file_writer": {"EventFileWriter": EventFileWriter},
    }
    for name, contents in parts.items():
        words = name.split(".")
        for end in range(1, len(words) + 1):
            module = types.ModuleType(".".join(words[:end]))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(sys.modules[name]).update(contents)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_a_run_is_not_tracked_unless_it_is_asked_for(tmp_path):
    assert open_tracker(TrackingSettings(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_it_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="rose-rl\\[tensorboard\\]"):
        open_tracker(ON, tmp_path)


def test_every_line_of_a_run_goes_where_it_belongs(tmp_path, tensorboard):
    tracker = open_tracker(ON, tmp_path)
    for line in run_lines():
        tracker.add(record(line))
    tracker.close()
    writer = tracker._writer
    assert writer.folder == str(tmp_path / "tensorboard") and writer.is_closed
    found = {(event.summary.value[0].tag, event.step): event.summary.value[0].simple_value for event in writer.events}
    assert found["evaluation/success", 8] == 0.6 and found["rollout/success", 3] == pytest.approx(19 / 64)
    assert found["pool/borrowed_turns", 1] == 200 and found["time/rollout_s", 2] == 4.0
    assert found["groups/kept", 1] == 8 and found["groups/total", 1] == 11


def test_what_a_step_does_not_know_is_no_curve():
    found = dict(scalars(record(step(1, 0.0, entropy=0.5, staleness_max=None, loss=-0.25, weights_bytes=900))))
    assert found["train/entropy"] == 0.5 and found["train/loss"] == -0.25 and found["weights/bytes"] == 900.0
    assert "train/staleness_max" not in found


@needs("tensorboard")
def test_tensorboard_reads_it_back(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    tracker = open_tracker(ON, tmp_path)
    tracker.add(record(step(4, 0.0)))
    tracker.close()
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [event] = read.Scalars("rollout/success")
    assert (event.step, event.value) == (4, pytest.approx(20 / 64))
