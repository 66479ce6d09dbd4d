"""The chain of weight versions: which records to fetch, and which to keep.

A version is published as records. A *delta* turns one earlier version into it; a *full snapshot* (anchor) is the
version itself. `shortest` returns the records that lead from what a receiver holds to a target; only the target is
installed. `kept` returns the records that must stay, so that a receiver

- with one of the last `versions` versions reaches the newest by deltas alone, and
- with nothing reaches it from the newest snapshot.

An epoch is one life of a trainer. It begins with a snapshot, and outranks every version of earlier epochs, so a trainer
that was replaced without knowing it publishes without effect.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

UNKNOWN = math.inf  # the number of a version that was not published yet: no weights are that new


@dataclass(frozen=True, slots=True, order=True)
class VersionId:
    """The weights after step `version`, as published in `epoch`. Later ones are greater."""

    epoch: int
    version: int

    def __str__(self) -> str:
        return f"{self.version} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One record of a version: a delta from `base`, or a full snapshot without one. The latest attempt counts."""

    version: VersionId
    base: VersionId | None
    size_bytes: int
    attempt: int = 0

    @property
    def is_anchor(self) -> bool:
        return self.base is None


def shortest(
    records: Iterable[VersionRecord], held: Container[VersionId], target: VersionId
) -> tuple[VersionRecord, ...] | None:
    """Return the records with the fewest bytes from any held version to the target, in order, or None."""
    anchors, deltas = _by_kind(records)
    best: tuple[VersionRecord, ...] | None = None
    tail: tuple[VersionRecord, ...] = ()
    at: VersionId | None = target
    while at is not None and at not in [record.base for record in tail[1:]]:
        if at in held:  # going further back only adds deltas
            return tail if best is None or _bytes(tail) <= _bytes(best) else best
        if at in anchors and (best is None or _bytes((anchors[at], *tail)) < _bytes(best)):
            best = (anchors[at], *tail)
        if at not in deltas:
            break
        tail = (deltas[at], *tail)
        at = deltas[at].base
    return best


def newest(records: Iterable[VersionRecord]) -> VersionId | None:
    """Return the greatest version that can be reached without any held version."""
    known = list(records)
    versions = sorted({record.version for record in known}, reverse=True)
    return next((version for version in versions if shortest(known, (), version) is not None), None)


def kept(records: Sequence[VersionRecord], versions: int) -> set[VersionRecord]:
    """Return the records that must stay. The others are superseded, or start from versions too old to be held."""
    epoch = max((record.version.epoch for record in records if record.is_anchor), default=None)
    if epoch is None:
        return set(records)
    anchors, deltas = _by_kind(record for record in records if record.version.epoch >= epoch)
    anchor = anchors[max(anchors)]
    bases = {delta.base for delta in deltas.values() if delta.base is not None}
    last = sorted({*anchors, *deltas, *bases})[-versions:] if versions > 0 else []
    oldest = min([anchor.version, *last])
    return {anchor} | {delta for delta in deltas.values() if delta.version > oldest}


def anchor_is_due(deltas_since_anchor: int | None, anchor_every: int) -> bool:
    """Return whether the next version needs a snapshot beside its delta; None means that the epoch has none."""
    return deltas_since_anchor is None or deltas_since_anchor + 1 >= anchor_every


def _bytes(records: Iterable[VersionRecord]) -> int:
    return sum(record.size_bytes for record in records)


def _by_kind(
    records: Iterable[VersionRecord],
) -> tuple[dict[VersionId, VersionRecord], dict[VersionId, VersionRecord]]:
    """Return snapshots and deltas by version, the latest attempt of each."""
    anchors: dict[VersionId, VersionRecord] = {}
    deltas: dict[VersionId, VersionRecord] = {}
    for record in sorted(records, key=lambda record: record.attempt):
        (anchors if record.is_anchor else deltas)[record.version] = record
    return anchors, deltas


@dataclass(frozen=True, slots=True)
class VersionDemand:
    """The weights that may sample a turn: exactly `version` if it is set, and none with a number below `number_min`.

    Published versions are numbered in their order; weights that were never published have the number -1.
    """

    version: str = ""
    number_min: float = -math.inf

    def allows(self, version: str, number: float) -> bool:
        return (not self.version or version == self.version) and number >= self.number_min


def has_waited_long(waited_s: float, wait_s: float, version_wait_s: float, *, has_version: bool) -> bool:
    """Return whether a turn has waited long enough for a worker: for a free one, or for one with its version."""
    return waited_s > (wait_s if has_version else version_wait_s)
