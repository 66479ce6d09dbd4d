"""The folder of a run: what was asked, what happened, and what came of it.

    runs/NAME/
      settings.yaml     every setting in force
      metrics.jsonl     one line per step, evaluation, sample and event
      serving.jsonl     one line per request of a user
      journal.jsonl     the facts about trajectories and what was decided on groups
      summary.json      the figures of the whole run
      report.html       the same as pictures; opens anywhere, loads nothing
      weights/          the relay: the newest versions of the weights, whole and as changes
      weights.secret    what they are signed with, unless the environment has it
      checkpoints/      the newest checkpoints
      logs/             what every process said
      run.lock          held while the run goes on

A name is used once: a run never writes into the folder of another. Only `rose run --resume` goes on in a folder that is
there; what it writes comes behind what was written before.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rose.config.load import write_resolved
from rose.envs.agents import lasting_name
from rose.errors import ConfigError, Unavailable
from rose.launch.locking import RunLock
from rose.launch.settings import RunSettings
from rose.launch.tracking import open_tracker
from rose.observe.journal import Journal, end_of_last_line

_encoder = msgspec.json.Encoder()


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
        self._serving = Lines(self.path / "serving.jsonl")
        self._tracker = open_tracker(settings.tracking, self.path)

    def record(self, kind: str, **values: Any) -> None:
        """One line of metrics. Raises Unavailable on a full disk."""
        self._metrics.append(_encoder.encode({"kind": kind, **values}))
        if self._tracker is not None:
            self._tracker.told(kind, values)

    def served(self, line: bytes) -> None:
        self._serving.append(line)

    def decided(self, fact: object, decisions: list[object]) -> None:
        self.journal.append(time.monotonic(), fact, decisions)

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        """A whole file or none."""
        path = self.path / name
        unfinished = path.with_name(f".{name}.{os.getpid()}")
        try:
            unfinished.touch(mode=mode)
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
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

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._bytes = end_of_last_line(self._file)
        os.ftruncate(self._file, self._bytes)  # what a power cut left of a line

    def append(self, line: bytes) -> None:
        data = line + b"\n"
        try:
            written = os.write(self._file, data)
        except OSError as error:
            raise _full(self._path, error) from error
        if written < len(data):
            os.ftruncate(self._file, self._bytes)
            raise _full(self._path, None)
        self._bytes += written

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


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
        path.mkdir(parents=True)
    except FileExistsError as error:
        hint = f"give this one another name: --name NAME; or go on with that one: rose run --resume {path}"
        raise ConfigError(f"there is a run {path} already", hint=hint) from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {error.strerror}", hint="choose another: --set runs=FOLDER"
        ) from error


def _full(path: Path, error: OSError | None) -> Unavailable:
    reason = error.strerror if error is not None else "the disk is full"
    return Unavailable(f"{path} cannot be written: {reason}", hint="free some space; what was written so far is whole")
