"""A run in trackers: which lines become curves, what the trackers read back, and what is said where they are not."""

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


@pytest.mark.parametrize("name", tracking.TRACKERS)
def test_without_the_package_it_is_said_before_anything_starts(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"rose-rl\\[{name}\\]"):
        open_tracker(TrackingSettings(**{name: True}), tmp_path)


def test_every_line_of_a_run_goes_where_it_belongs(tmp_path, tensorboard):
    tracker = open_tracker(ON, tmp_path)
    for line in run_lines():
        tracker.add(record(line))
    tracker.close()
    writer = tracker._writers[0]._writer
    assert writer.folder == str(tmp_path / "tensorboard") and writer.is_closed
    found = {(event.summary.value[0].tag, event.step): event.summary.value[0].simple_value for event in writer.events}
    assert found["evaluation/success", 8] == 0.6 and found["rollout/success", 3] == pytest.approx(19 / 64)
    assert found["pool/borrowed_turns", 1] == 200 and found["time/rollout_s", 2] == 4.0
    assert found["groups/kept", 1] == 8 and found["groups/total", 1] == 11


def test_what_a_step_does_not_know_is_no_curve():
    found = dict(scalars(record(step(1, 0.0, entropy=0.5, staleness_max=None, loss=-0.25, weights_bytes=900))))
    assert found["train/entropy"] == 0.5 and found["train/loss"] == -0.25 and found["weights/bytes"] == 900.0
    assert "train/staleness_max" not in found


@needs("trackers")
def test_tensorboard_reads_it_back(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    tracker = open_tracker(ON, tmp_path)
    tracker.add(record(step(4, 0.0)))
    tracker.close()
    read = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    [event] = read.Scalars("rollout/success")
    assert (event.step, event.value) == (4, pytest.approx(20 / 64))


@needs("trackers")
def test_mlflow_reads_it_back(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = open_tracker(TrackingSettings(mlflow=True, project="games"), tmp_path)
    for number in (4, 5):
        tracker.add(record(step(number, 0.0)))
    tracker.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("games").experiment_id])
    assert run.info.run_name == tmp_path.name and run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, "rollout/success")
    assert [(point.step, point.value) for point in points] == [(4, pytest.approx(20 / 64)), (5, pytest.approx(21 / 64))]


@needs("trackers")
def test_weights_and_biases_keeps_it_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = open_tracker(TrackingSettings(wandb=True, project="games"), tmp_path)
    tracker.add(record(step(4, 0.0)))
    tracker.close()
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"rollout/success" in file.read_bytes() and b"games" in file.read_bytes()
