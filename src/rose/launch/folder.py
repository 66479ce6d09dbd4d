"""The folder of a run: what was asked, what happened, and what came of it.

    runs/NAME/
      settings.yaml     every setting in force
      metrics.jsonl     one line per step, evaluation, sample and event
      serving.jsonl     one line per request of a user; the newest only (serving.1.jsonl has those before)
      journal.jsonl     the facts about trajectories and what was decided on groups
      summary.json      the figures of the whole run
      report.html       the same as pictures; opens anywhere, loads nothing
      weights/          the relay: the newest versions of the weights, whole and as changes
      weights.secret    what they are signed with, unless the environment has it
      checkpoints/      the newest checkpoints
      logs/             what every process said, the newest part of it
      run.lock          held while the run goes on

Only its user may enter the folder. A run can go on for months, so the files that grow with time are bounded: the oldest
lines of serving.jsonl and of the logs are dropped, and a metrics.jsonl that is full takes only the lines that say where
the run is.

A name is used once: a run never writes into the folder of another. Only `rose run --resume` goes on in a folder that is
there; what it writes comes behind what was written before.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rose.config.load import write_resolved
from rose.envs.agents import lasting_name
from rose.errors import ConfigError, Unavailable
from rose.launch.ending import ENDED
from rose.launch.locking import RunLock
from rose.launch.rotating import RotatingFile
from rose.launch.settings import RunSettings
from rose.launch.tracking import open_tracker
from rose.observe.journal import Journal
from rose.private_files import FOLDER_MODE, write_durable

_encoder = msgspec.json.Encoder()
SERVING_BYTES_MAX = 64 << 20  # some 400,000 requests, twice; the summary reads all of them into memory
METRICS_BYTES_MAX = 64 << 20  # five days of samples; a step is some 2 KB and is written in any case
KEPT_KINDS = frozenset(
    {"step", "balance", "sync", "weights", "evaluation", "costs", "lending", "finished", "resume", ENDED}
)


class RunFolder:
    """Open for one run, and locked meanwhile. Not thread-safe."""

    def __init__(self, settings: RunSettings, *, is_resumed: bool = False) -> None:
        self.name = settings.name or time.strftime("%Y-%m-%d-%H%M%S")
        self.path = Path(settings.runs) / self.name
        if not is_resumed:
            _make(self.path)
        self._lock = RunLock(self.path)
        self.weights, self.checkpoints, self.logs, self.ledger = (
            self.path / part for part in ("weights", "checkpoints", "logs", "ledger.sqlite")
        )  # fmt: skip
        self.weights.mkdir(exist_ok=True)
        write_resolved(in_force(settings, self.name), self.path)
        self.journal = Journal(self.path / "journal.jsonl")
        self._metrics = Lines(self.path / "metrics.jsonl")
        self._serving = Lines(self.path / "serving.jsonl", SERVING_BYTES_MAX)
        self._tracker = open_tracker(settings.tracking, self.path)

    def record(self, kind: str, **values: Any) -> None:
        """Append one line of metrics, unless the file is full and a run can do without it.

        Raises Unavailable on a full disk.
        """
        if self._metrics.size_bytes < METRICS_BYTES_MAX or kind in KEPT_KINDS:
            self._metrics.append(_encoder.encode({"kind": kind, **values}))
        if self._tracker is not None:
            self._tracker.told(kind, values)

    def served(self, line: bytes) -> None:
        self._serving.append(line)

    def decided(self, fact: object, decisions: list[object]) -> None:
        self.journal.append(time.monotonic(), fact, decisions)

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        """Write a file, durably: after a crash it is whole or not there. Raises Unavailable on a full disk."""
        path = self.path / name
        try:
            write_durable(path, text.encode(), mode)
        except OSError as error:
            raise _full(path, error) from error
        return path

    def prune(self, parent: Path, keep: int) -> None:
        """Of the folders in `parent`, named by number, only the newest stay."""
        found = [child for child in parent.iterdir() if child.is_dir() and not child.name.startswith(".")]
        for old in sorted(found, key=by_number)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self.journal.close()
        self._metrics.close()
        self._serving.close()
        if self._tracker is not None:
            self._tracker.close()
        self._lock.close()


class Lines:
    """A file of JSON lines. A line is written whole or cut off again."""

    def __init__(self, path: Path, bytes_max: int = sys.maxsize) -> None:
        self._path, self._file = path, RotatingFile(path, bytes_max)

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def append(self, line: bytes) -> None:
        """Raises Unavailable on a full disk."""
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            raise _full(self._path, error) from error

    def close(self) -> None:
        self._file.close()


def by_number(path: Path) -> tuple[int, str]:
    """For sorting names that differ in a number with leading zeros, which may outgrow them."""
    return len(path.name), path.name


def in_force(settings: RunSettings, name: str) -> RunSettings:
    """Under the name it has got, and with a model and an agent that are found from wherever the run is resumed."""
    model, agent = settings.rollout_model, settings.agent
    return replace(
        settings,
        name=name,
        rollout_model=None if model is None else str(Path(model).resolve()),
        agent=None if agent is None else lasting_name(agent),
    )


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=FOLDER_MODE, parents=True)
    except FileExistsError as error:
        hint = f"give this one another name: --name NAME; or go on with that one: rose run --resume {path}"
        raise ConfigError(f"there is a run {path} already", hint=hint) from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {error.strerror}", hint="choose another: --set runs=FOLDER"
        ) from error


def _full(path: Path, error: OSError) -> Unavailable:
    hint = "free some space; what was written so far is whole"
    return Unavailable(f"{path} cannot be written: {error.strerror}", hint=hint)
