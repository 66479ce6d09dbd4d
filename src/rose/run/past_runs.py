"""Past runs, read from their folders: whole, half-written or broken, each with what is wrong with it.

A run that was killed has no summary; its figures are made from the records that it had written. So are those of a run
that an earlier version of ROSE summed up, which did not know all figures. Nothing in a folder is trusted: what cannot
be read is reported, and the other runs are shown all the same. The last records of a run say how it ended:

    finished      it has had all its steps
    interrupted   the user stopped it, with Ctrl-C or SIGTERM
    failed        an error ended it, and the record says which
    running       a process holds the lock of its folder
    broken off    no such record, and no process holds the lock: killed, or the machine went down
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from rose.bounds import UNREADABLE
from rose.config import yaml_text as text
from rose.config.loading import RESOLVED_NAME
from rose.errors import ConfigError, RoseError
from rose.run.resume_filter import counted
from rose.run.run_folder import is_held
from rose.run.run_records import (
    EndedRecord,
    FinishedRecord,
    ResumeRecord,
    read_records,
    read_served,
    records_in,
)
from rose.run.run_statistics import summary_of
from rose.run.summary import priced_by

State = Literal["finished", "interrupted", "failed", "running", "broken off", "broken"]
TAIL_BYTES = 1 << 16  # a few samples at most follow the exit record


class Stopped(Exception):
    """The user asked the run to end."""


def exit_record(error: BaseException) -> EndedRecord:
    """Return the record of a run that this error ends early."""
    if isinstance(error, Stopped | asyncio.CancelledError | KeyboardInterrupt):
        return EndedRecord(how="interrupted", at_s=time.monotonic())
    why = error.what if isinstance(error, RoseError) else f"{type(error).__name__}: {error}"
    return EndedRecord(how="failed", why=why[:500], at_s=time.monotonic())


def state_of(folder: Path, metrics: str, *, has_all_steps: bool, is_summed_up: bool) -> tuple[State, str]:
    """Return the state, and why a failed run failed. Earlier versions wrote no exit record, but a summary."""
    if is_held(folder):
        return "running", ""
    try:
        with (folder / metrics).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            tail = file.read()
    except OSError:
        tail = b""
    kinds = (FinishedRecord, EndedRecord, ResumeRecord)  # a resumed run has not ended, whatever it recorded before
    record = ([None] + [line for line in records_in(tail, is_lenient=True) if isinstance(line, kinds)])[-1]
    if isinstance(record, FinishedRecord):
        return "finished", ""
    if isinstance(record, EndedRecord):
        return ("failed", record.why) if record.how == "failed" else ("interrupted", "")
    if is_summed_up:
        return "finished" if has_all_steps else "interrupted", ""
    return "broken off", ""


SUMMARY, METRICS, SERVING, REPORT = "summary.json", "metrics.jsonl", "serving.jsonl", "report.html"
NEWEST_KEY = "notes"
"""What a summary of this version has; one without it is made again."""


@dataclass(frozen=True, slots=True)
class PastRun:
    """`summary` is None when not even figures can be had; `trouble` says what is wrong, if anything is."""

    name: str
    path: Path
    state: State
    began_s: float  # on the wall clock
    summary: dict[str, Any] | None
    settings: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""

    @property
    def report(self) -> Path | None:
        found = self.path / REPORT
        return found if found.is_file() else None

    def shown(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": str(self.path),
            "state": self.state,
            "began_s": self.began_s,
            "trouble": self.trouble,
            "summary": self.summary,
        }


def past_runs(folder: Path) -> list[PastRun]:
    """Return all runs in a folder, the oldest first. Raises ConfigError without such a folder."""
    try:
        found = [child for child in folder.iterdir() if _is_run(child)]
    except OSError as error:
        hint = "another folder, --runs FOLDER, or make the first run: rose run"
        raise ConfigError(f"the folder {folder} cannot be read: {error.strerror}", hint=hint) from error
    return sorted((read_run(child) for child in found), key=lambda run: (run.began_s, run.name))


def find_run(folder: Path, name: str) -> PastRun:
    """Return a run by its name or the path of its folder. Raises ConfigError, which names the nearest."""
    for place in (folder / name, Path(name)):
        if _is_run(place):
            return read_run(place)
    known = [run.name for run in past_runs(folder)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else "`rose runs ls` lists those there are"
    raise ConfigError(f"there is no run {name!r} in {folder}", hint=hint)


def read_run(path: Path) -> PastRun:
    """Return a run, whatever state its folder is in."""
    troubles: list[str] = []
    settings = _settings(path, troubles)
    summary = _written_summary(path, troubles)
    is_summed_up = summary is not None
    if summary is None or NEWEST_KEY not in summary:
        summary = _made_summary(path, troubles) or summary
    state: State = "broken"
    if summary is not None:
        had, wanted = summary.get("steps"), settings.get("steps")
        has_all_steps = not isinstance(had, int) or not isinstance(wanted, int) or had >= wanted
        state, why = state_of(path, METRICS, has_all_steps=has_all_steps, is_summed_up=is_summed_up)
        reasons = {
            "interrupted": "it was stopped before its last step",
            "failed": f"an error ended it: {why}",
            "broken off": "it was killed before it could say how it ended",
        }
        if state in reasons:
            troubles.append(f"{reasons[state]} (rose run --resume {path} goes on)")
    return PastRun(path.name, path, state, _began_s(path), summary, settings, "; ".join(troubles))


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (RESOLVED_NAME, METRICS, SUMMARY))


def _settings(path: Path, troubles: list[str]) -> dict[str, Any]:
    try:
        tree = text.read_file(path / RESOLVED_NAME)
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        troubles.append(f"{RESOLVED_NAME} cannot be read: {_words(error)}")
        return {}
    return dict(flattened(tree)) if isinstance(tree, dict) else {}


def flattened(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _written_summary(path: Path, troubles: list[str]) -> dict[str, Any] | None:
    try:
        summary = json.loads((path / SUMMARY).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        troubles.append(f"{SUMMARY} cannot be read: {_words(error)}")
        return None
    if not isinstance(summary, dict):
        troubles.append(f"{SUMMARY} holds no figures")
        return None
    return summary


def _made_summary(path: Path, troubles: list[str]) -> dict[str, Any] | None:
    """Return the figures from the records of the run, as its end would have made them."""
    try:
        records = counted(read_records(path / METRICS)) if (path / METRICS).exists() else []
        served = read_served(path / SERVING) if (path / SERVING).exists() else []
        summary = summary_of(path.name, records, served, *priced_by(path / RESOLVED_NAME))
        return dict(msgspec.to_builtins(summary))
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        words = _words(error)
        troubles.append(
            f"no figures can be made{'' if any(words in trouble for trouble in troubles) else f': {words}'}"
        )
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        troubles.append(f"its lines are not those of a run of this version: {type(error).__name__} {error}")
    return None


def _began_s(path: Path) -> float:
    times = [found.stat().st_mtime for name in (RESOLVED_NAME, METRICS, SUMMARY) if (found := path / name).exists()]
    return min(times, default=0.0)


def _words(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return error.what
    return str(getattr(error, "strerror", None) or error)
