"""The agent's view of serving's KV pool: which pool the rollout engine joins, and whether it blocks serving.

A rollout engine joins the pool of one serving engine for its life. When that serving engine ends, the rollout engine
has to end too: its imports would keep the memory of the pool alive beside the next one's. An engine that is stopped or
hangs keeps its pages; if serving asks for pages meanwhile, the agent ends it after a bound, and the kernel frees them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rose.errors import ConfigError, Unavailable
from rose.vllm.control_segment import Status
from rose.vllm.engine_process import RolloutEngineSettings
from rose.vllm.status_segment import SegmentHeader, SegmentReader

KvChoice = Literal["auto", "pool", "static"]
HAND_OVER_S_MAX = 5.0  # a live engine hands pages over within a step, or one swap of weights


class PoolMembership:
    """The pool of one serving engine after the other, as the agent follows it."""

    def __init__(self, choice: KvChoice) -> None:
        self._choice = choice
        self.segment: Path | None = None  # of the serving engine whose pool the rollout engine has joined
        self.pages = self.page_bytes = self.serving_pages = 0
        self._asked_since_s: float | None = None

    def settings(self, engine: RolloutEngineSettings, segment: Path | None) -> RolloutEngineSettings:
        """Return an engine's settings with the KV memory that it gets. Raises ConfigError without a pool it needs."""
        header = _header_of(segment) if segment is not None and self._choice != "static" else None
        self.segment = None
        if header is not None and header.pool:
            _check_ranks(header.pool_ranks, engine)
            self.segment, self.pages, self.page_bytes = segment, header.pool_pages, header.page_bytes
            return replace(engine, kv_pool=header.pool, kv_memory_mb=header.pool_pages * header.page_bytes >> 20)
        if self._choice == "pool":
            raise ConfigError(
                "the serving engine has no KV pool to share",
                hint="start it with ROSE_KV_POOL=auto in its environment, or lend with --kv static",
            )
        return engine

    def is_lost(self, segment: Path | None) -> bool:
        """Return whether the rollout engine has joined a pool that is not of this serving engine."""
        return self.segment is not None and segment != self.segment

    def is_blocking(self, status: Status | None, now_s: float) -> bool:
        """Return whether an engine that shows no life keeps pages that serving has asked for, for too long."""
        assert self.segment is not None
        asked = 0
        with suppress(Unavailable):
            reader = SegmentReader(self.segment)
            self.serving_pages, _, asked = reader.pages
            reader.close()
        if not asked or status is None or not status.pages:
            self._asked_since_s = None
            return False
        since_s = self._asked_since_s = self._asked_since_s or now_s
        return now_s - max(since_s, status.at_s) > HAND_OVER_S_MAX


def _check_ranks(ranks: int, engine: RolloutEngineSettings) -> None:
    """Raise ConfigError unless every rank of the engine finds a pool of its own."""
    if ranks != engine.ranks:
        raise ConfigError(
            f"the serving engine's KV pool has {ranks} tensor-parallel ranks, and the rollout engine on "
            f"{engine.device} has {engine.ranks}",
            hint="lend all devices of the serving engine with as many ranks, or lend with --kv static",
        )


def _header_of(segment: Path) -> SegmentHeader | None:
    with suppress(Unavailable):
        reader = SegmentReader(segment)
        reader.close()
        return reader.header
    return None
