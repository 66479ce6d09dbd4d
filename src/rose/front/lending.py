"""The owner's desk of a lent device, in the serving front: asks the engine, shows figures, keeps the journal.

A lost deadline is logged, and every breach journaled with its cause, as it happens (one step in a hundred may be longer
than its estimate: that is counted, not logged); everything else is asked of the engine when somebody looks. Figures
are the engine's own and begin anew when it restarts, which Prometheus takes for what it is; what the owner said does
not (standing.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rose.coserve import messages
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.front.standing import STOPS
from rose.front.supervisor import Supervisor
from rose.observe.journal import Journal
from rose.observe.metrics import Metrics

logger = logging.getLogger("rose.front")

REFRESH_S = 1.0  # a scrape does not wait longer for an engine that is busy; it then shows the last figures
KINDS = ("step", "ttft", "tpot")  # of breaches
BREACHES_LOGGED = 20  # then only counted: a device in trouble must not fill the disk with it


class LendingDesk:
    """One per lent device."""

    def __init__(self, engine: Supervisor, token: str, metrics: Metrics, journal: Journal | None = None) -> None:
        self.token = token
        self._engine = engine
        self._journal = journal
        self._last: messages.LendingStatus | None = None
        self._logged = 0
        engine.on_word = self._hear
        mirror_lending(metrics, lambda: self._last)

    async def ask(self, control: messages.Control) -> messages.LendingStatus:
        """The status after doing it. Raises what the engine refuses with, Unavailable without one."""
        if control.action == "status":
            return await self._ask(control)
        # Whoever said it may be gone before the answer: it is remembered all the same.
        return await asyncio.shield(self._say(control))

    async def refresh(self) -> None:
        """Before a scrape."""
        try:
            async with asyncio.timeout(REFRESH_S):
                await self.ask(messages.Control("status"))
        except (RoseError, TimeoutError):
            return

    async def _say(self, word: messages.Control) -> messages.LendingStatus:
        # What stops lending holds in the next engine even if this one fails at it.
        if word.action in STOPS and self._engine.trouble is None:
            self._engine.orders.said(word)
        status = await self._ask(word)
        self._engine.orders.said(word)
        return status

    async def _ask(self, control: messages.Control) -> messages.LendingStatus:
        orders = self._engine.orders
        if orders.removed and orders.told is not None and self._engine.trouble is None:
            self._last = without_rollouts(orders.told, orders.removed)
            if control.action in ("resume", "dry_run", "limits"):
                raise RequestRefused(orders.removed, hint="restart the device to lend it again")
            return self._last
        reply = await self._engine.ask(control)
        if reply.lending is None:
            raise Unavailable("the device cannot say how it is lent", hint="restart it to lend it again")
        self._last = reply.lending
        return reply.lending

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _hear(self, word: messages.Breached | messages.Noted) -> None:
        try:
            if isinstance(word, messages.Breached):
                self._breached(word)
            elif self._journal is not None:
                self._journal.append_line(word.line)
        except RoseError as error:
            logger.error("the journal is closed: %s", error.what)
            self._journal = None

    def _breached(self, word: messages.Breached) -> None:
        breach = word.breach
        self._logged += breach.objective != "step"
        if breach.objective != "step" and self._logged <= BREACHES_LOGGED:
            logger.warning(
                "breach (%s): %s: %.1f ms, limit %.1f ms, of it lent %.1f ms",
                breach.objective, breach.cause, breach.actual_s * 1e3, breach.limit_s * 1e3, breach.lent_s * 1e3,
            )  # fmt: skip
        if self._journal is not None:
            self._journal.append(breach.at_s, breach)


def without_rollouts(lend: messages.Lend, why: str) -> messages.LendingStatus:
    """How it stands on an engine that was started without the rollout model."""
    limits = next((word for word in lend.words if word.action == "limits"), messages.Control("limits"))
    shares = (limits.memory_share, lend.terms.memory_share), (limits.compute_share, lend.terms.compute_share)
    memory_share, compute_share = (said if said is not None else given for said, given in shares)
    return messages.LendingStatus(
        state="failed", why=why, mode=lend.terms.mode, model="absent", model_bytes=0, activation_s=None, parking_s=None,
        running=0, waiting=0, lent_steps=0, lent_tokens=0, lent_s=0.0, evictions=0, evicted_tokens=0,
        breaches=dict.fromkeys(KINDS, 0), doubtful=0, breaker_trips=0, page_bytes=lend.terms.page_kb << 10, pages=0,
        rollout_pages=0, rollout_pages_max=0, serving_pages=0, headroom_pages=0, memory_state="open",
        lending_stretch=1.0, memory_share=memory_share, compute_share=compute_share,
    )  # fmt: skip


# Figures

Status = Callable[[], messages.LendingStatus | None]
Read = Callable[[messages.LendingStatus], float]


def mirror_lending(metrics: Metrics, status: Status) -> None:
    """Everything that lending counts, as it is when somebody looks; nothing while there is no status."""
    what = "Lent steps over their estimate, and missed deadlines that serving alone would have met."
    by_kind = {kind: _breaches(status, kind) for kind in KINDS}
    metrics.mirror_by("counter", "rose_slo_breaches", what, "kind", by_kind)
    for name, what, read in _COUNTERS:
        metrics.mirror("counter", name, what, _reading(status, read))
    for name, what, read in _GAUGES:
        metrics.mirror("gauge", name, what, _reading(status, read))


def _reading(status: Status, read: Read) -> Callable[[], float | None]:
    return lambda: None if (now := status()) is None else read(now)


def _breaches(status: Status, kind: str) -> Callable[[], float | None]:
    return _reading(status, lambda now: now.breaches.get(kind, 0))


_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("rose_rollout_tokens", "Tokens that lent steps computed.", lambda status: status.lent_tokens),
    ("rose_rollout_steps", "Lent steps.", lambda status: status.lent_steps),
    ("rose_lent_seconds", "Time lent to rollouts.", lambda status: status.lent_s),
    ("rose_rollout_evictions", "Rollouts evicted.", lambda status: status.evictions),
    ("rose_rollout_evicted_tokens", "Computed tokens that evictions threw away.", lambda status: status.evicted_tokens),
    ("rose_breaker_trips", "Times the circuit breaker stopped lending.", lambda status: status.breaker_trips),
    ("rose_slo_doubtful", "Misses that only earlier lending could explain.", lambda status: status.doubtful),
)
_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("rose_lending", "1 while the device is lent, else 0.", lambda status: float(status.state == "lending")),
    ("rose_rollout_pages", "Pages of KV memory that rollouts hold.", lambda status: status.rollout_pages),
    ("rose_rollout_pages_max", "Pages that rollouts may hold.", lambda status: status.rollout_pages_max),
    ("rose_serving_pages", "Pages of KV memory that serving holds.", lambda status: status.serving_pages),
    ("rose_lending_stretch", "How much longer requests live than alone.", lambda status: status.lending_stretch),
)
