"""How a run ended. It says its last word itself, as a line of its metrics; who is killed cannot, and leaves a lock
that nobody holds.

    finished      it has had all its steps
    interrupted   somebody stopped it, with Ctrl-C or a polite kill
    failed        an error ended it, and the line says which
    running       a process holds the lock of its folder
    broken off    no last word, and nobody holds the lock: killed, or the machine went down
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from rose.errors import RoseError
from rose.launch.locking import is_held

State = Literal["finished", "interrupted", "failed", "running", "broken off"]
FINISHED, ENDED, RESUMED = "finished", "ended", "resume"
"""Kinds of lines. Of those in a file the last one holds: a run that was resumed takes back what it said before."""
TAIL_BYTES = 1 << 16  # behind the last word come a few samples at most


class Stopped(Exception):
    """Somebody asked the run to end."""


def last_word(error: BaseException) -> dict[str, str]:
    """Of a run that this ends early, for its `ended` line."""
    if isinstance(error, Stopped | asyncio.CancelledError | KeyboardInterrupt):
        return {"how": "interrupted", "why": ""}
    why = error.what if isinstance(error, RoseError) else f"{type(error).__name__}: {error}"
    return {"how": "failed", "why": why[:500]}


def state_of(folder: Path, metrics: str, *, has_all_steps: bool, is_summed_up: bool) -> tuple[State, str]:
    """And why, of one that failed. Runs of earlier versions said nothing when they ended early, but summed up."""
    if is_held(folder):
        return "running", ""
    word = _last_word_in(folder / metrics)
    if word.get("kind") == FINISHED:
        return "finished", ""
    if word.get("kind") == ENDED:
        return ("failed", str(word.get("why"))) if word.get("how") == "failed" else ("interrupted", "")
    if is_summed_up:
        return "finished" if has_all_steps else "interrupted", ""
    return "broken off", ""


def _last_word_in(path: Path) -> dict[str, Any]:
    words = [line for line in map(_decoded, _tail(path).split(b"\n")) if line.get("kind") in (FINISHED, ENDED, RESUMED)]
    return words[-1] if words else {}


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read()
    except OSError:
        return b""


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
