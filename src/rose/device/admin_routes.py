"""Admin controls of a lent device, in the serving front: routes, figures for Prometheus, and the journal.

`GET /rose/lending` shows the state of lending; `POST /rose/lending/ACTION` changes it and answers with the new state.
`GET /rose/steps` returns steps that both engines ran, for a step profile (`rose profile`). All are on the serving port
and need the owner's token. A missed deadline is logged, and every breach is journaled with its cause, as it happens.
One step in a hundred may be longer than its estimate: that is counted, not logged. Figures are the engine's own and
begin anew when it restarts; admin commands do not (engine_supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from rose.bounds import Share
from rose.core.accountant import KINDS
from rose.core.lending_state import RESTART, LendingState
from rose.device import engine_messages
from rose.device.engine_supervisor import STOPS, Supervisor
from rose.engines.base import LendingStatus
from rose.engines.recorded_steps import RecordedSteps
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.observe.journal import Journal
from rose.observe.metrics import Metrics, MirrorKind
from rose.openai.access import check_bearer
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import Failure
from rose.openai.openapi import get, post
from rose.openai.request_parsing import BodyReader
from rose.openai.response_writing import json_response

logger = logging.getLogger("rose.device")

ACTIONS = ("pause", "resume", "drain", "remove", "dry-run", "limits")
REFRESH_S = 1.0  # a scrape does not wait longer for an engine that is busy; it then shows the last figures
BREACHES_LOGGED = 20  # then only counted: a device in trouble must not fill the disk with it


class LendingControls:
    """The admin controls of one lent device."""

    def __init__(self, supervisor: Supervisor, token: str, metrics: Metrics, journal: Journal | None = None) -> None:
        self.token = token
        self._supervisor, self._engine = supervisor, supervisor.client
        self._journal = journal
        self._last: LendingStatus | None = None
        self._logged = 0
        self._engine.events.notices.subscribe(self._on_notice)
        mirror_lending(metrics, lambda: self._last)

    async def ask(self, command: engine_messages.AdminCommand) -> LendingStatus:
        """Return the status after a command. Raises what the engine refuses it with, or Unavailable without one."""
        if command.action == "status":
            return await self._ask(command)
        # The client may be gone before the reply: the command is remembered all the same.
        return await asyncio.shield(self._change(command))

    async def steps(self) -> RecordedSteps:
        """Return the recorded steps of both engines."""
        steps = await self._engine.recorded_steps()
        if steps is None:
            raise Unavailable("the device lends nothing, and records no steps", hint="restart it to lend it again")
        return steps

    async def refresh(self) -> None:
        """Bring the figures up to date before a scrape."""
        with contextlib.suppress(RoseError, TimeoutError):
            async with asyncio.timeout(REFRESH_S):
                await self.ask(engine_messages.AdminCommand("status"))

    async def _change(self, command: engine_messages.AdminCommand) -> LendingStatus:
        # A command that stops lending holds in the next engine even if this one fails at it.
        if command.action in STOPS and self._engine.trouble is None:
            self._supervisor.desired.on_command(command)
        status = await self._ask(command)
        self._supervisor.desired.on_command(command)
        return status

    async def _ask(self, command: engine_messages.AdminCommand) -> LendingStatus:
        desired = self._supervisor.desired
        if desired.removed and desired.lend_terms is not None and self._engine.trouble is None:
            self._last = without_rollouts(desired.lend_terms, desired.removed)
            if command.action in ("resume", "dry_run", "limits"):
                raise RequestRefused(desired.removed, hint=RESTART)
            return self._last
        status = await self._engine.control(command)
        if status is None:
            raise Unavailable("the device does not report how it is lent", hint="restart it to lend it again")
        self._last = status
        return status

    def _on_notice(self, notice: engine_messages.Notice) -> None:
        try:
            if isinstance(notice, engine_messages.Breached):
                self._on_breach(notice)
            elif self._journal is not None:
                self._journal.append_line(notice.line)
        except RoseError as error:
            logger.error("the journal is closed: %s", error.what)
            self._journal = None

    def _on_breach(self, notice: engine_messages.Breached) -> None:
        breach = notice.breach
        self._logged += breach.objective != "step"
        if breach.objective != "step" and self._logged <= BREACHES_LOGGED:
            logger.warning(
                "breach (%s): %s: %.1f ms, limit %.1f ms, of it lent %.1f ms",
                breach.objective, breach.cause, breach.actual_s * 1e3, breach.limit_s * 1e3, breach.lent_s * 1e3,
            )  # fmt: skip
        if self._journal is not None:
            self._journal.append(breach.at_s, breach)


def without_rollouts(lend: engine_messages.Lend, why: str) -> LendingStatus:
    """Return the status of an engine that was started without the rollout model."""
    limits = next((one for one in lend.commands if one.action == "limits"), engine_messages.AdminCommand("limits"))
    shares = (limits.memory_share, lend.terms.memory_share), (limits.compute_share, lend.terms.compute_share)
    memory_share, compute_share = (new if new is not None else initial for new, initial in shares)
    return LendingStatus(
        state=LendingState.FAILED, why=why, mode=lend.terms.chosen_mode, model="absent", model_bytes=0,
        activation_s=None, parking_s=None, running=0, waiting=0, lent_steps=0, lent_tokens=0, lent_s=0.0,
        evictions=0, evicted_tokens=0, breaches=dict.fromkeys(KINDS, 0), breaker_trips=0,
        page_bytes=lend.terms.page_kb << 10, pages=0, rollout_pages=0, rollout_pages_max=0, serving_pages=0,
        headroom_pages=0, memory_state="open", lending_stretch=1.0, memory_share=memory_share,
        compute_share=compute_share,
    )  # fmt: skip


class ControlBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `limits`: shares of the KV memory and of the device's time, 0 to 1. Other actions have none."""

    memory_share: Share | None = None
    compute_share: Share | None = None


READER = BodyReader(ControlBody)


@dataclass(frozen=True, kw_only=True)
class LentContext(HttpContext):
    """The context of the serving port of a lent device."""

    controls: LendingControls

    async def refresh(self) -> None:
        await self.controls.refresh()


async def status(context: HttpContext, request: web.Request) -> web.Response:
    return json_response(await _controls(context, request).ask(engine_messages.AdminCommand("status")))


async def control(context: HttpContext, request: web.Request) -> web.Response:
    controls, action = _controls(context, request), request.match_info["action"]
    if action not in ACTIONS:
        raise Failure(404, f"there is no action `{action[:40]}`; there are {', '.join(ACTIONS)}", code="not_found")
    raw = await context.read(request)
    body = READER.read(raw) if raw else ControlBody()
    name: Any = action.replace("-", "_")
    return json_response(await controls.ask(engine_messages.AdminCommand(name, body.memory_share, body.compute_share)))


async def steps(context: HttpContext, request: web.Request) -> web.Response:
    return json_response(await _controls(context, request).steps())


def _controls(context: HttpContext, request: web.Request) -> LendingControls:
    assert isinstance(context, LentContext)
    check_bearer(request, context.controls.token)
    return context.controls


ADMIN_ROUTES = (
    get("/rose/lending", status, "How lending goes.", reply=LendingStatus, statuses=(401, 503)),
    get("/rose/steps", steps, "The recorded steps of both engines.", reply=RecordedSteps, statuses=(401, 503)),
    post(
        "/rose/lending/{action}",
        control,
        "pause, resume, drain, remove, dry-run or limits.",
        reader=READER,
        reply=LendingStatus,
        statuses=(400, 401, 404, 408, 413, 503),
    ),
)


# Figures for Prometheus

Status = Callable[[], LendingStatus | None]
Read = Callable[[LendingStatus], float]


def mirror_lending(metrics: Metrics, status: Status) -> None:
    """Show what lending counts, as it is at each scrape; nothing while there is no status."""

    def reading(read: Read) -> Callable[[], float | None]:
        return lambda: None if (now := status()) is None else float(read(now))

    what = "Lent steps over their estimate, and missed deadlines that serving alone would have met."
    by_kind = {kind: reading(lambda now, kind=kind: now.breaches.get(kind, 0)) for kind in map(str, KINDS)}  # type: ignore[misc]
    metrics.mirror_by("counter", "rose_slo_breaches", what, "kind", by_kind)
    for figure, name, what, read in _FIGURES:
        metrics.mirror(figure, name, what, reading(read))


_FIGURES: tuple[tuple[MirrorKind, str, str, Read], ...] = (
    ("counter", "rose_rollout_tokens", "Tokens that lent steps computed.", lambda now: now.lent_tokens),
    ("counter", "rose_rollout_steps", "Lent steps.", lambda now: now.lent_steps),
    ("counter", "rose_lent_seconds", "Time lent to rollouts.", lambda now: now.lent_s),
    ("counter", "rose_rollout_evictions", "Rollouts evicted.", lambda now: now.evictions),
    (
        "counter",
        "rose_rollout_evicted_tokens",
        "Computed tokens that evictions threw away.",
        lambda now: now.evicted_tokens,
    ),
    ("counter", "rose_breaker_trips", "Times the circuit breaker stopped lending.", lambda now: now.breaker_trips),
    (
        "counter",
        "rose_slo_doubtful",
        "Old name of the ambiguous breaches.",
        lambda now: now.breaches.get("ambiguous", 0),
    ),
    ("gauge", "rose_lending", "1 while the device is lent, else 0.", lambda now: now.state is LendingState.LENDING),
    ("gauge", "rose_rollout_pages", "Pages of KV memory that rollouts hold.", lambda now: now.rollout_pages),
    ("gauge", "rose_rollout_pages_max", "Pages that rollouts may hold.", lambda now: now.rollout_pages_max),
    ("gauge", "rose_serving_pages", "Pages of KV memory that serving holds.", lambda now: now.serving_pages),
    ("gauge", "rose_lending_stretch", "How much longer requests live than alone.", lambda now: now.lending_stretch),
)
