"""The folder of a run: what was asked, what happened, and what came of it.

    runs/NAME/
      settings.yaml     every setting in force
      metrics.jsonl     one line per step, evaluation, sample and event
      serving.jsonl     one line per request of a user
      journal.jsonl     the facts about trajectories and what was decided on groups
      summary.json      the figures of the whole run
      report.html       the same as pictures; opens anywhere, loads nothing
      weights/          the relay: the newest versions of the weights, whole and as changes
      weights.secret    what they are sealed with, unless the environment has it
      checkpoints/      the newest checkpoints
      logs/             what every process said

A name is used once: a run never writes into the folder of another.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from rose.config.load import write_resolved
from rose.errors import ConfigError, Unavailable
from rose.launch.settings import RunSettings
from rose.launch.tracking import open_tracker
from rose.observe.journal import Journal

_encoder = msgspec.json.Encoder()


class RunFolder:
    """Open for one run. Not thread-safe."""

    def __init__(self, settings: RunSettings) -> None:
        self.name = settings.name or time.strftime("%Y-%m-%d-%H%M%S")
        self.path = _made(Path(settings.runs) / self.name)
        self.weights, self.checkpoints, self.logs = (
            self.path / part for part in ("weights", "checkpoints", "logs")
        )  # fmt: skip
        self.weights.mkdir()
        write_resolved(settings, self.path)
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
        found = sorted(child for child in parent.iterdir() if child.is_dir() and not child.name.startswith("."))
        for old in found[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self.journal.close()
        self._metrics.close()
        self._serving.close()
        if self._tracker is not None:
            self._tracker.close()


class Lines:
    """A file of JSON lines. A line is written whole or cut off again."""

    def __init__(self, path: Path) -> None:
        self._path, self._bytes = path, 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

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


def _made(path: Path) -> Path:
    try:
        path.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigError(f"there is a run {path} already", hint="give this one another name: --name NAME") from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {error.strerror}", hint="choose another: --set runs=FOLDER"
        ) from error
    return path


def _full(path: Path, error: OSError | None) -> Unavailable:
    reason = error.strerror if error is not None else "the disk is full"
    return Unavailable(f"{path} cannot be written: {reason}", hint="free some space; what was written so far is whole")
