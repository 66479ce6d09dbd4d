"""The folder of a run: its settings, its records and its results.

    runs/NAME/
      settings.yaml     every setting in force
      metrics.jsonl     one line per step, evaluation, sample and event
      serving.jsonl     one line per request of a user; the newest only (serving.1.jsonl has those before)
      journal.jsonl     the facts about trajectories and what was decided on groups
      summary.json      the figures of the whole run
      report.html       the same as plots; opens anywhere, loads nothing
      weights/          the relay: the newest versions of the weights, whole and as changes
      weights.secret    what they are signed with, unless the environment has it
      checkpoints/      the newest checkpoints
      logs/             the output of every process, the newest part of it
      run.lock          held while the run goes on, by one process; the kernel releases it however that process ends

Only its user may enter the folder. A run can go on for months, so the files that grow with time are bounded: the oldest
lines of serving.jsonl and of the logs are dropped, and a full metrics.jsonl takes only the records in `KEPT_KINDS`. A
run never writes into the folder of another; only `rose run --resume` continues in an existing folder. Times
`at_s` are of the monotonic clock; `utc` in each line is when it was written.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from rose.config.loading import write_resolved
from rose.envs.openai_agent import absolute_name
from rose.errors import ConfigError, Unavailable
from rose.observe.journal import Journal
from rose.observe.wall_clock import stamped
from rose.private_files import FOLDER_MODE, write_durable
from rose.run.rotating import RotatingFile
from rose.run.run_records import (
    BalanceRecord,
    CostsRecord,
    EndedRecord,
    EvaluationRecord,
    FinishedRecord,
    LendingRecord,
    LentRecord,
    OriginRecord,
    ResumeRecord,
    RunRecord,
    StepRecord,
    SyncRecord,
    WeightsRecord,
)
from rose.run.run_settings import RunSettings
from rose.run.tracking import open_tracker

LOCK_NAME = "run.lock"
LOCK_TRIES, LOCK_PAUSE_S = 5, 0.02  # `is_held` of another process has the lock for an instant


class RunLock:
    """Lock that is held until it is closed. Raises ConfigError while another process has it."""

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}", hint="check its permissions") from error
        try:
            for tries_left in reversed(range(LOCK_TRIES)):
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not tries_left:
                        raise
                    time.sleep(LOCK_PAUSE_S)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            who = f", in process {holder}" if holder else ""
            hint = "wait for its end, or stop it with Ctrl-C there"
            raise ConfigError(f"the run in {folder} is still going on{who}", hint=hint) from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_held(folder: Path) -> bool:
    """Return whether a process runs in this folder."""
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


_encoder = msgspec.json.Encoder()
SERVING_BYTES_MAX = 64 << 20  # some 400,000 requests, twice; the summary reads all of them into memory
METRICS_BYTES_MAX = 64 << 20  # five days of samples; a step is some 2 KB and is written in any case
KEPT_KINDS = (
    StepRecord, BalanceRecord, SyncRecord, WeightsRecord, EvaluationRecord, CostsRecord, LendingRecord, LentRecord,
    FinishedRecord, ResumeRecord, EndedRecord, OriginRecord,
)  # fmt: skip


class RunFolder:
    """Folder that is open for one run, and locked meanwhile. Not thread-safe."""

    def __init__(self, settings: RunSettings, *, is_resumed: bool = False) -> None:
        self.name = settings.name or time.strftime("%Y-%m-%d-%H%M%S")
        self.path = Path(settings.runs) / self.name
        if not is_resumed:
            try:
                self.path.mkdir(mode=FOLDER_MODE, parents=True)
            except FileExistsError as error:
                hint = f"give this one another name: --name NAME; or resume that one: rose run --resume {self.path}"
                raise ConfigError(f"there is a run {self.path} already", hint=hint) from error
            except OSError as error:
                hint = "choose another: --set runs=FOLDER"
                raise ConfigError(f"{self.path} cannot be made: {error.strerror}", hint=hint) from error
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

    def record(self, record: RunRecord) -> None:
        """Append a record to the metrics, unless the file is full and a run can do without it.

        Raises Unavailable on a full disk.
        """
        if self._metrics.size_bytes < METRICS_BYTES_MAX or isinstance(record, KEPT_KINDS):
            self._metrics.append(stamped(_encoder.encode(record)))
        if self._tracker is not None:
            self._tracker.add(record)

    def served(self, line: bytes) -> None:
        self._serving.append(stamped(line.strip()))

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
        """Delete all but the newest folders in `parent`, which are named by number."""
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
        """Append a line. Raises Unavailable on a full disk."""
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            raise _full(self._path, error) from error

    def close(self) -> None:
        self._file.close()


def by_number(path: Path) -> tuple[int, str]:
    """Return a sort key for names that end with a number, which may outgrow its leading zeros."""
    return len(path.name), path.name


def in_force(settings: RunSettings, name: str) -> RunSettings:
    """Return the settings with the run's name, and with paths that are valid wherever the run is resumed."""
    model, agent = settings.rollout_model, settings.agent
    return replace(
        settings,
        name=name,
        rollout_model=None if model is None else str(Path(model).resolve()),
        agent=None if agent is None else absolute_name(agent),
    )


def _full(path: Path, error: OSError) -> Unavailable:
    hint = "free some space; what was written so far is whole"
    return Unavailable(f"{path} cannot be written: {error.strerror}", hint=hint)
