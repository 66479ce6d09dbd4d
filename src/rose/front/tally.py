"""Facts of an engine that may be replaced: levels are the newest one's, counters those of all engines so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rose.engines.base import EngineFacts

COUNTERS = ("prefix_query_tokens", "prefix_hit_tokens", "preemptions", "steps", "prompt_tokens", "generated_tokens")
LEVELS = ("running", "waiting", "kv_blocks_used", "kv_blocks_cached")


class Tally:
    """Tell it of every engine that starts and of its newest facts when it goes."""

    def __init__(self) -> None:
        self._idle: EngineFacts  # what is shown while there is no engine, less the counters
        self._base: EngineFacts | None = None  # counters of the engines that are gone

    def started(self, facts: EngineFacts) -> None:
        self._idle = _emptied(facts)

    def gone(self, newest: EngineFacts) -> None:
        self._base = self.total(newest)
        self._idle = _emptied(newest)

    def total(self, newest: EngineFacts | None) -> EngineFacts:
        """`newest` is None while there is no engine."""
        now = newest if newest is not None else self._idle
        base = self._base
        if base is None:
            return now
        return replace(now, **{name: getattr(now, name) + getattr(base, name) for name in COUNTERS})


def _emptied(facts: EngineFacts) -> EngineFacts:
    nothing: dict[str, Any] = dict.fromkeys((*COUNTERS, *LEVELS), 0)
    return replace(facts, **nothing)
