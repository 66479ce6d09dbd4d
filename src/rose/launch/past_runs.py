"""Runs that were, from their folders: whole, half-written or broken, each with a word about what is wrong with it.

A run that was killed has no summary; its figures are taken from the lines it had written until then. So are those of a
run that an earlier version of ROSE summed up, which did not know all figures. Nothing in a folder is taken for granted:
what cannot be read is told, and the other runs are shown all the same.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rose.config import text
from rose.config.load import RESOLVED_NAME
from rose.errors import ConfigError
from rose.launch import ending
from rose.launch.figures import summary_of
from rose.launch.summing_up import priced_by, read_lines
from rose.launch.superseding import counted

SUMMARY, METRICS, SERVING, REPORT = "summary.json", "metrics.jsonl", "serving.jsonl", "report.html"
NEWEST_KEY = "notes"
"""What a summary of this version has; one without it is made again."""

State = ending.State | Literal["broken"]


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
    """All runs in a folder, the oldest first. Raises ConfigError without such a folder."""
    try:
        found = [child for child in folder.iterdir() if _is_run(child)]
    except OSError as error:
        hint = "name it: --runs FOLDER; `rose run` makes one called runs where it is started"
        raise ConfigError(f"there are no runs in {folder}: {error.strerror}", hint=hint) from error
    return sorted((read_run(child) for child in found), key=lambda run: (run.began_s, run.name))


def find_run(folder: Path, name: str) -> PastRun:
    """By its name, or by the path of its folder. Raises ConfigError, which names the nearest."""
    for place in (folder / name, Path(name)):
        if _is_run(place):
            return read_run(place)
    known = [run.name for run in past_runs(folder)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else "`rose runs ls` lists those there are"
    raise ConfigError(f"there is no run {name!r} in {folder}", hint=hint)


def read_run(path: Path) -> PastRun:
    """Whatever state the folder is in."""
    troubles: list[str] = []
    settings = _settings(path, troubles)
    summary = _written_summary(path, troubles)
    is_summed_up = summary is not None
    if summary is None or NEWEST_KEY not in summary:
        summary = _made_summary(path, troubles) or summary
    state: State = "broken"
    if summary is not None:
        has_all_steps = _has_all_steps(summary, settings)
        state, why = ending.state_of(path, METRICS, has_all_steps=has_all_steps, is_summed_up=is_summed_up)
        troubles += _told(state, why, path)
    return PastRun(path.name, path, state, _began_s(path), summary, settings, "; ".join(troubles))


def _has_all_steps(summary: dict[str, Any], settings: dict[str, Any]) -> bool:
    had, wanted = summary.get("steps"), settings.get("steps")
    return not isinstance(had, int) or not isinstance(wanted, int) or had >= wanted


def _told(state: State, why: str, path: Path) -> list[str]:
    """What is to be said of an end that was none."""
    words = {
        "interrupted": "it was stopped before its last step",
        "failed": f"an error ended it: {why}",
        "broken off": "it was killed before it could say how it ended",
    }
    return [f"{words[state]} (rose run --resume {path} goes on)"] if state in words else []


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
    """Settings by their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _written_summary(path: Path, troubles: list[str]) -> dict[str, Any] | None:
    try:
        found = json.loads((path / SUMMARY).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        troubles.append(f"{SUMMARY} cannot be read: {_words(error)}")
        return None
    if not isinstance(found, dict):
        troubles.append(f"{SUMMARY} holds no figures")
        return None
    return found


def _made_summary(path: Path, troubles: list[str]) -> dict[str, Any] | None:
    """From the lines of the run, as its end would have made it."""
    try:
        lines, served = counted(_lines(path / METRICS)), _lines(path / SERVING)
        return {"name": path.name, **summary_of(lines, served, *priced_by(path / RESOLVED_NAME))}
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        words = _words(error)
        troubles.append(f"no figures can be made{'' if any(words in told for told in troubles) else f': {words}'}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        troubles.append(f"its lines are not those of a run of this version: {type(error).__name__} {error}")
    return None


def _lines(path: Path) -> list[dict[str, Any]]:
    """A run without users has no lines of them."""
    return read_lines(path) if path.exists() else []


def _began_s(path: Path) -> float:
    times = [found.stat().st_mtime for name in (RESOLVED_NAME, METRICS, SUMMARY) if (found := path / name).exists()]
    return min(times, default=0.0)


def _words(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return error.what
    return str(getattr(error, "strerror", None) or error)
