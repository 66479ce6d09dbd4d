"""Which weights lead where: the chain of versions, as far as it can be decided without touching a byte.

A version is published as links. A *delta* turns one earlier version into it; an *anchor* is the version itself, for
whoever holds nothing useful. From the links there are, `shortest` says which to fetch to get from what is held to what
is wanted, and only the last of them is ever installed; `kept` says which links must stay, so that

- whoever holds one of the last `versions` versions reaches the newest by deltas alone, and
- whoever holds nothing reaches it from the newest anchor.

An epoch is one life of a trainer. Every epoch begins with an anchor, and a higher epoch outranks every version of a
lower one: a trainer that was replaced, and does not know it, publishes into the void.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class VersionId:
    """The weights after step `version`, as published in `epoch`; later ones are greater."""

    epoch: int
    version: int

    def __str__(self) -> str:
        return f"{self.version} (epoch {self.epoch})"


@dataclass(frozen=True, slots=True)
class Link:
    """One way to a version: from `base`, or, without one, from nothing. Of several the latest attempt counts."""

    version: VersionId
    base: VersionId | None
    size_bytes: int
    attempt: int = 0

    @property
    def is_anchor(self) -> bool:
        return self.base is None


def shortest(links: Iterable[Link], held: Container[VersionId], target: VersionId) -> tuple[Link, ...] | None:
    """The links with the fewest bytes that lead from anything held to the target, in order; None if none do."""
    anchors, deltas = _sorted_out(links)
    best: tuple[Link, ...] | None = None
    tail: tuple[Link, ...] = ()
    at: VersionId | None = target
    while at is not None and at not in [link.base for link in tail[1:]]:
        if at in held:  # going further back only adds deltas
            return tail if best is None or _bytes(tail) <= _bytes(best) else best
        if at in anchors and (best is None or _bytes((anchors[at], *tail)) < _bytes(best)):
            best = (anchors[at], *tail)
        if at not in deltas:
            break
        tail = (deltas[at], *tail)
        at = deltas[at].base
    return best


def newest(links: Iterable[Link]) -> VersionId | None:
    """The greatest version that can be reached from nothing; members that hold more are ahead of the relay."""
    known = list(links)
    versions = sorted({link.version for link in known}, reverse=True)
    return next((version for version in versions if shortest(known, (), version) is not None), None)


def kept(links: Sequence[Link], versions: int) -> set[Link]:
    """What must stay. The rest is superseded, or leads from versions that nobody is expected to hold any more."""
    epoch = max((link.version.epoch for link in links if link.is_anchor), default=None)
    if epoch is None:
        return set(links)
    anchors, deltas = _sorted_out(link for link in links if link.version.epoch >= epoch)
    anchor = anchors[max(anchors)]
    bases = {delta.base for delta in deltas.values() if delta.base is not None}
    last = sorted({*anchors, *deltas, *bases})[-versions:] if versions > 0 else []
    oldest = min([anchor.version, *last])
    return {anchor} | {delta for delta in deltas.values() if delta.version > oldest}


def anchor_is_due(deltas_since_anchor: int | None, anchor_every: int) -> bool:
    """Whether the next version needs an anchor beside its delta; None means that this epoch has no anchor yet."""
    return deltas_since_anchor is None or deltas_since_anchor + 1 >= anchor_every


def _bytes(links: Iterable[Link]) -> int:
    return sum(link.size_bytes for link in links)


def _sorted_out(links: Iterable[Link]) -> tuple[dict[VersionId, Link], dict[VersionId, Link]]:
    """Anchors and deltas by their version, the latest attempt of each."""
    found: tuple[dict[VersionId, Link], dict[VersionId, Link]] = ({}, {})
    for link in sorted(links, key=lambda link: link.attempt):
        found[0 if link.is_anchor else 1][link.version] = link
    return found
