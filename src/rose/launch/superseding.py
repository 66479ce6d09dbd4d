"""What of a run's lines counts, after it was killed and resumed. Pure: lines in, lines out.

The file of metrics is only ever appended to. A run that was resumed says so in a `resume` line, with the last step that
it did not have to do again; what an earlier attempt had said of later steps counts no more, though it stays in the
file. So each step and each evaluation is counted once, and the last word is the one that holds.

Counters begin anew with the processes: turns by pool and breaches of the lent device go on from what the attempt
before had. What processors had worked since the last mark of an attempt that was killed is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]
ONCE = ("step", "evaluation", "balance", "sync")
"""Kinds of which there is at most one line for every step."""
LAST_WORDS = ("weights", "finished", "ended")
OPENING = ("begin", "resume")
"""Marks of processor time that wait for another to close them."""
COUNTS = {"sample": "turns", "lending": "breaches"}
"""Kinds of lines with counts that begin anew, and what these are called there."""


def counted(lines: Sequence[Line]) -> list[Line]:
    """The lines of a run as if it had never been interrupted, but for the `resume` lines themselves."""
    found: list[Line] = []
    counts, is_resumed = {kind: _Counts(name) for kind, name in COUNTS.items()}, False
    for line in lines:
        if line["kind"] == "resume":
            found, is_resumed = _taken_back(found, line["step"]), True
            for count in counts.values():
                count.begin()
        found.append(counts[line["kind"]].onwards(line) if line["kind"] in counts else line)
    return _once(found) if is_resumed else found


def _taken_back(lines: Sequence[Line], step: int) -> list[Line]:
    """What holds of an attempt, when another goes on behind this step."""
    kept = [line for line in lines if line["kind"] not in LAST_WORDS]
    kept = [line for line in kept if line["kind"] not in ONCE or line.get("step", 0) <= step]
    marks = [line for line in kept if line["kind"] == "costs"]
    if marks and marks[-1]["when"] in OPENING:
        kept.remove(marks[-1])
    return kept


def _once(lines: Sequence[Line]) -> list[Line]:
    last = {_key(line): place for place, line in enumerate(lines)}
    return [line for place, line in enumerate(lines) if line["kind"] not in ONCE or last[_key(line)] == place]


def _key(line: Line) -> tuple[Any, ...]:
    return line["kind"], line.get("step")


class _Counts:
    """By pool or kind, over all attempts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def begin(self) -> None:
        self._before = dict(self._last)

    def onwards(self, line: Line) -> Line:
        told = {kind: count + self._before.get(kind, 0) for kind, count in line[self._name].items()}
        self._last = self._before | told
        return line | {self._name: self._last}
