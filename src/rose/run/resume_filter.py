"""Filter for the records of a run that was killed and resumed: only what still counts. Pure.

The file of metrics is only ever appended to. A run that was resumed writes a `resume` record, with the last step that
it did not have to repeat. What an earlier attempt recorded of later steps stays in the file and counts no more. So each
step and each evaluation counts once, and the last record holds.

Counters begin anew with the processes: turns by pool, breaches of the lent device and what it has lent go on from what
the attempt before had. What processors had worked since the last mark of an attempt that was killed is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rose.run.run_records import (
    BalanceRecord,
    CostsRecord,
    EndedRecord,
    EvaluationRecord,
    FinishedRecord,
    LendingRecord,
    LentRecord,
    ResumeRecord,
    RunRecord,
    SampleRecord,
    StepRecord,
    SyncRecord,
    WeightsRecord,
)

ONCE = (StepRecord, EvaluationRecord, BalanceRecord, SyncRecord)
"""Kinds of which there is at most one line for every step."""
AT_THE_END = (WeightsRecord, FinishedRecord, EndedRecord)
OPENING = ("begin", "resume")
"""Marks of processor time that wait for another to close them."""
COUNTS: dict[type[RunRecord], str] = {SampleRecord: "turns", LendingRecord: "breaches", LentRecord: "counts"}
"""Kinds of lines with counts that begin anew, and what these are called there."""


def counted(lines: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records as if the run had never been interrupted, but for the `resume` records themselves."""
    found: list[RunRecord] = []
    counts, is_resumed = {kind: _Counts(name) for kind, name in COUNTS.items()}, False
    for line in lines:
        if isinstance(line, ResumeRecord):
            found, is_resumed = _still_valid(found, line.step), True
            for count in counts.values():
                count.begin()
        found.append(counts[type(line)].onwards(line) if type(line) in counts else line)
    return _once(found) if is_resumed else found


def _still_valid(lines: Sequence[RunRecord], step: int) -> list[RunRecord]:
    """Return what still counts of an attempt when another resumes after this step."""
    kept = [line for line in lines if not isinstance(line, AT_THE_END)]
    kept = [line for line in kept if not isinstance(line, ONCE) or (line.step or 0) <= step]
    marks = [line for line in kept if isinstance(line, CostsRecord)]
    if marks and marks[-1].when in OPENING:
        kept.remove(marks[-1])
    return kept


def _once(lines: Sequence[RunRecord]) -> list[RunRecord]:
    last = {_key(line): place for place, line in enumerate(lines)}
    return [line for place, line in enumerate(lines) if not isinstance(line, ONCE) or last[_key(line)] == place]


def _key(line: RunRecord) -> tuple[Any, ...]:
    return type(line), getattr(line, "step", None)


class _Counts:
    """Counts by pool or kind, over all attempts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: dict[str, int] = {}
        self._last: dict[str, int] = {}

    def begin(self) -> None:
        self._before = dict(self._last)

    def onwards(self, line: RunRecord) -> RunRecord:
        counts = {kind: count + self._before.get(kind, 0) for kind, count in getattr(line, self._name).items()}
        self._last = self._before | counts
        return msgspec.structs.replace(line, **{self._name: self._last})
