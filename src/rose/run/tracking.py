"""A run in TensorBoard, by setting: the lines of metrics.jsonl as curves, while the run goes.

    rose run --set tracking.tensorboard=true
    tensorboard --logdir runs

metrics.jsonl is written always and has more in it; this is another view of the same lines. TensorBoard is an optional
package. It is looked for before anything is started, and imported only by a run that wants it.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rose.config.schema import setting
from rose.errors import ConfigError
from rose.run.run_records import EvaluationRecord, RunRecord, StepRecord

FOLDER = "tensorboard"
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
Put = Callable[[str, float, int], None]


@dataclass(frozen=True, slots=True)
class TrackingSettings:
    tensorboard: bool = setting(False, "whether the run is also written for TensorBoard (its package is an extra)")


def check_tracking(settings: TrackingSettings) -> None:
    """Raises ConfigError for a tracker that is not installed."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tracking.tensorboard is on, and the package tensorboard is not installed",
            hint="pip install 'rose-rl[tensorboard]', or leave it out: metrics.jsonl and report.html have the same",
        )


def open_tracker(settings: TrackingSettings, run_folder: Path) -> Tracker | None:
    """Return a tracker, or None for a run that is not tracked. Raises ConfigError."""
    check_tracking(settings)
    return Tracker(run_folder / FOLDER) if settings.tensorboard else None


class Tracker:
    """Writer of curves: give `add` every record, and it takes what it can draw."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))

    def add(self, record: RunRecord) -> None:
        if not isinstance(record, StepRecord | EvaluationRecord):
            return
        for tag, value in scalars(record):
            summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
            self._writer.add_event(self._event(wall_time=time.time(), step=record.step, summary=summary))

    def close(self) -> None:
        self._writer.close()


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
