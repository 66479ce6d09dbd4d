"""The KV memory of a serving engine on a page pool: it takes free pages at once and asks nobody.

Before a step it takes enough for the next block of every running request; where vLLM lacks blocks inside a step, it
takes more. If no page is free, rollouts hold them: serving publishes how many pages it asks for, and the rollout
engine makes room (`rollout_memory`). Waiting requests go on waiting meanwhile, as in any full engine. A running one
would be preempted and computed again, so serving waits a moment for pages, and then not again for a while.

Rather than overwrite its prefix cache serving takes free pages too, and it keeps what it holds and does not use, until
rollouts write that they would use it. An error ends growth for a while and lending for good; serving goes on with what
it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from rose.vllm.elastic_kv import ElasticKv
from rose.vllm.status_segment import WAITING_SHOWN, SegmentWriter

logger = logging.getLogger("vllm.rose")

HAND_OVER_S = 0.2  # that a running request waits for pages: less than its prompt takes to compute again
PATIENCE_S = 5.0  # after it waited in vain: a stopped rollout engine must not slow down every step
POLL_S = 0.001
CALM_S = 1.0  # between growing and giving back, so that groups do not go back and forth
RETRY_S = 10.0  # after an error


class ServingMemory:
    """What one serving scheduler does with its groups."""

    def __init__(self, kv: ElasticKv, scheduler: Any, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self.kv, self._scheduler, self._now_s = kv, scheduler, now_s
        self.writer: SegmentWriter | None = None
        self._is_short = self._has_failed = False
        self._changed_s = self._blocked_until_s = self._impatient_until_s = 0.0
        kv.watch_allocations(self._find)

    def before_step(self) -> None:
        """Take memory for what running requests may need and for the prefix cache, or give back what rollouts use."""
        self._is_short = False
        balloon, reserve = self.kv.balloon, self._reserve()
        if balloon.free < reserve:
            self._grow(reserve - balloon.free)
        elif self._wanted():
            self.give_back_unused()
        elif balloon.absent:
            enough = min(reserve + self._waiting_blocks(), balloon.size)
            self._grow(enough - balloon.free_uncached(enough))

    def _wanted(self) -> int:
        """Return how many pages rollouts would use."""
        return self.writer.wanted_pages(self._now_s()) if self.writer is not None else 0

    def _reserve(self) -> int:
        """Return how many free blocks a step should find: one for every running request, and a prompt's first."""
        return len(self._scheduler.running) + 1

    def _grow(self, blocks: int) -> int:
        now_s = self._now_s()
        if blocks <= 0 or now_s < self._blocked_until_s:
            return 0
        try:
            grown = self.kv.grow(self.kv.groups_for(blocks))
        except Exception as error:
            self._blocked_until_s = now_s + RETRY_S
            self.on_error(error)
            return 0
        if grown:
            self._changed_s = now_s
        return grown

    def _find(self, request: Any, missing: int) -> bool:
        """Return whether there are more blocks for a request now."""
        if self._grow(missing):
            return True
        self._is_short = bool(self.kv.balloon.absent)
        return self._is_short and request.status.name == "RUNNING" and self._wait_for_pages(missing)

    def _wait_for_pages(self, blocks: int) -> bool:
        now_s = self._now_s()
        if now_s < self._impatient_until_s:
            return False
        self.publish(blocks)
        deadline_s = now_s + HAND_OVER_S
        while self._now_s() < deadline_s:
            time.sleep(POLL_S)
            if self._grow(blocks):
                return True
        self._impatient_until_s = self._now_s() + PATIENCE_S
        return False

    def give_back_unused(self) -> None:
        """Give back groups that rollouts would use and no request refers to."""
        now_s, balloon, wanted = self._now_s(), self.kv.balloon, self._wanted()
        if not wanted or now_s - self._changed_s < CALM_S or self._waiting_blocks():
            return
        self._changed_s = now_s
        spare = (balloon.free - self._reserve()) // balloon.size - 1  # one group stays, for what comes next
        count = min(-(-wanted // self.kv.groups.pages), spare)
        if count > 0:
            try:
                self.kv.give_back(balloon.empty()[:count])
            except Exception as error:
                self.on_error(error)

    def on_step_ended(self) -> None:
        """Let groups go that waited for the step."""
        try:
            self.kv.on_step_ended()
        except Exception as error:
            self.on_error(error)

    def _waiting_blocks(self) -> int:
        """Return about how many blocks the requests lack that wait."""
        scheduler = self._scheduler
        queues = (scheduler.kv_holding_waiting, scheduler.waiting)
        waiting = (request for queue in queues for request in islice(getattr(queue, "_heap", queue), WAITING_SHOWN))
        return sum([self.kv.blocks_for(len(request._all_token_ids) + 1) for request in waiting])

    def publish(self, missing: int = 0) -> None:
        """Publish the pages that serving holds, uses and asks for."""
        if self.writer is None:
            return
        kv, asked = self.kv, 0
        if self._is_short and self._scheduler.requests:
            missing = max(missing, self._waiting_blocks() + self._reserve() - kv.balloon.free)
            groups = min(max(1, kv.groups_for(missing)), len(kv.balloon.absent))
            asked = groups * kv.groups.pages
        self.writer.pages(kv.held_pages, kv.used_pages, asked)

    def on_error(self, error: Exception) -> None:
        """End lending, and log why, once."""
        if not self._has_failed:
            logger.exception("ROSE: the KV pool failed; serving goes on with the memory it has and is not lent")
        self._has_failed = True
        if self.writer is not None:
            self.writer.publish_stop(f"its KV pool failed: {error}")
