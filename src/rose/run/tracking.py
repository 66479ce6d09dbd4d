"""A run in TensorBoard, Weights & Biases or MLflow, by setting: the lines of metrics.jsonl as curves, as the run goes.

    rose run --set tracking.tensorboard=true        tensorboard --logdir runs
    rose run --set tracking.wandb=true              WANDB_MODE=offline writes into the run's folder only
    rose run --set tracking.mlflow=true             MLFLOW_TRACKING_URI, or mlflow.db in the run's folder

metrics.jsonl is written always and has more in it; this is another view of the same lines. Each tracker is an optional
package. It is looked for before anything is started, and imported only by a run that wants it.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rose.config.schema import setting
from rose.errors import ConfigError
from rose.run.run_records import EvaluationRecord, RunRecord, StepRecord

FOLDER, MLFLOW_FILE = "tensorboard", "mlflow.db"
BATCHES_MAX = 100  # steps that an MLflow server may be behind before the run waits for it
TAGS = {
    "rollout": ("reward_mean", "trajectories", "turns", "generated_tokens", "episodes_failed"),
    "groups": ("groups_kept", "groups_total"),
    "time": ("rollout_s", "train_s", "publish_s", "step_s"),
    "train": (
        "loss", "gradient_norm", "learning_rate", "entropy", "importance_mean", "truncated_share", "left_out_share",
        "clipped_share", "drifted_share", "logprob_gap_mean", "logprob_gap_max", "rollout_kl", "reference_kl",
        "staleness_mean", "staleness_max", "trained_tokens",
    ),
    "weights": ("weights_bytes", "weights_ratio"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrackingSettings:
    tensorboard: bool = setting(False, "whether the run is also written for TensorBoard (its package is an extra)")
    wandb: bool = setting(False, "whether it is sent to Weights & Biases (an extra); WANDB_MODE=offline sends nothing")
    mlflow: bool = setting(False, "whether it is written to MLflow (an extra), at MLFLOW_TRACKING_URI or in its folder")
    project: str = setting("rose", "project of Weights & Biases, experiment of MLflow")


def check_tracking(settings: TrackingSettings) -> None:
    """Raises ConfigError for a tracker that is not installed."""
    for name in TRACKERS:
        if getattr(settings, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name} is on, and the package {name} is not installed",
                hint=f"pip install 'rose-rl[{name}]', or leave it out: metrics.jsonl and report.html have the same",
            )


def open_tracker(settings: TrackingSettings, run_folder: Path) -> Tracker | None:
    """Return a tracker, or None for a run that is not tracked. Raises ConfigError."""
    check_tracking(settings)
    writers = [make(settings, run_folder) for name, make in TRACKERS.items() if getattr(settings, name)]
    return Tracker(writers) if writers else None


class CurveWriter(Protocol):
    """A place where curves are written."""

    def put(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writer of curves: give `add` every record, and it takes what it can draw."""

    def __init__(self, writers: Sequence[CurveWriter]) -> None:
        self._writers = writers

    def add(self, record: RunRecord) -> None:
        if isinstance(record, StepRecord | EvaluationRecord):
            values = dict(scalars(record))
            for writer in self._writers:
                writer.put(values, record.step)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class TensorBoardWriter:
    def __init__(self, settings: TrackingSettings, run_folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run_folder / FOLDER))

    def put(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
            self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Weights & Biases. Steps are a curve of their own: an evaluation may come after the next step began."""

    def __init__(self, settings: TrackingSettings, run_folder: Path) -> None:
        import wandb

        quiet = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(
                project=settings.project, name=run_folder.name, dir=str(run_folder), settings=quiet, reinit="create_new"
            )
        except (wandb.errors.Error, OSError) as error:
            hint = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise ConfigError(f"Weights & Biases does not take the run: {error}", hint=hint) from error
        self._run.define_metric("*", step_metric="step")

    def put(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MlflowWriter:
    def __init__(self, settings: TrackingSettings, run_folder: Path) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric, self._pending = Metric, deque[Any]()
        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run_folder / MLFLOW_FILE).resolve()}"
        try:
            self._client = MlflowClient(tracking_uri=place)
            known = self._client.get_experiment_by_name(settings.project)
            experiment = known.experiment_id if known else self._client.create_experiment(settings.project)
            self._id = self._client.create_run(experiment, run_name=run_folder.name).info.run_id
        except (MlflowException, OSError) as error:
            hint = "check MLFLOW_TRACKING_URI, or leave tracking.mlflow out"
            raise ConfigError(f"MLflow at {place} does not take the run: {error}", hint=hint) from error

    def put(self, values: Mapping[str, float], step: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        points = [self._metric(tag, value, now_ms, step) for tag, value in values.items()]
        self._pending.append(self._client.log_batch(self._id, points, synchronous=False))  # a server may be far away
        while len(self._pending) > BATCHES_MAX:
            self._pending.popleft().wait()

    def close(self) -> None:
        for batch in self._pending:
            batch.wait()
        self._client.set_terminated(self._id)


TRACKERS: dict[str, Callable[[TrackingSettings, Path], CurveWriter]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "mlflow": MlflowWriter,
}


def scalars(record: StepRecord | EvaluationRecord) -> Iterator[tuple[str, float]]:
    """Yield the figures of a record that are curves, by their tags."""
    if isinstance(record, EvaluationRecord):
        yield "evaluation/success", float(record.success_rate)
        return
    yield "rollout/success", record.successes / max(1, record.trajectories)
    for pool, turns in record.turns_by_pool.items():
        yield f"pool/{pool}_turns", float(turns)
    for part, keys in TAGS.items():
        for key in keys:
            if isinstance(value := getattr(record, key), int | float):
                yield f"{part}/{key.removeprefix(part + '_')}", float(value)
