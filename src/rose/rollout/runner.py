"""The turns of one agent on its engine: starts them, tells what every step added, hands them back.

Tokens are taken from the engine's steps, all turns of a step at once. A turn that has ended is told at once, whole,
since somebody waits for it. Of the others what has come is told every tenth of a second in one message, and more
rarely when many run, since it is only needed if this worker dies; told by the token, it would cost the gateway
more than all the rest of the turn. A turn's own mailbox is not read: it only tells when the engine cannot go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from rose.bounds import FLOAT_MAX, LOG_PROBABILITY_MAX
from rose.coserve import messages as engine_messages
from rose.engines.base import FinishReason, TokenEvent
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.front.handle import EngineHandle
from rose.rollout.messages import PIECES_MAX, Piece, Refused, ToGateway, Tokens, Turn
from rose.rollout.rates import Rates

GATHER_S = 0.1  # the most work of a turn that dies with its worker; also how often a streaming reader sees news
GATHER_S_MAX = 0.3  # on a worker with many turns; well under the half second after which one may have stalled
LOWEST = -FLOAT_MAX
NO_NUMBER = "a log-probability that is no number; the weights may have diverged"
TOLD_PER_S = 100  # turns of one worker, about, whose news is told in a second


def gather_s(turns: int) -> float:
    """How long news of turns that go on is gathered on a worker that has so many."""
    return min(GATHER_S_MAX, max(GATHER_S, turns / TOLD_PER_S))


class AgentEngine(EngineHandle, Protocol):
    """An engine as the agent needs it: a `Supervisor` or a `Seat`."""

    on_step: Callable[[engine_messages.Stepped], None]
    on_lending: Callable[[], None]  # called when the owner, or whoever may, has changed something

    @property
    def lending_status(self) -> engine_messages.LendingStatus | None:
        """How the device is lent; None if it is not, or does not say."""

    async def ask(self, command: engine_messages.Command) -> engine_messages.Reply: ...


class _Gathered:
    """What some steps added to one turn under one version."""

    __slots__ = ("cached_tokens", "finish_reason", "logprobs", "ticket", "token_ids", "top_logprobs", "version")

    def __init__(self, ticket: int, version: str) -> None:
        self.ticket, self.version = ticket, version
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens: int | None = None

    def piece(self) -> Piece:
        return Piece(
            self.ticket,
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.version,
            self.finish_reason,
            self.cached_tokens,
            tuple(self.top_logprobs),
        )


class TurnRunner:
    """One per connection to the gateway."""

    def __init__(
        self, engine: AgentEngine, say: Callable[[ToGateway], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.rates = Rates()
        self._engine, self._say, self._now_s = engine, say, now_s
        self._tickets: dict[str, int] = {}  # request id -> ticket, of turns that have not ended
        self._gathered: dict[int, _Gathered] = {}  # by ticket
        self._full: list[_Gathered] = []  # ended, or followed by those of a newer version of the same turn
        self._timer: asyncio.TimerHandle | None = None
        self._others = engine.on_step
        engine.on_step = self._on_step

    @property
    def running(self) -> int:
        return len(self._tickets)

    def start(self, turn: Turn) -> None:
        request = msgspec.structs.replace(turn.request, arrival_s=self._now_s())
        here = self._engine.facts.version
        try:
            if turn.version is not None and turn.version != here:
                raise Unavailable(f"version `{here}` runs here, not `{turn.version}`")
            mailbox = self._engine.submit([request])
        except RoseError as error:
            self._say(Refused(turn.ticket, engine_messages.fault_of(error)))
            return
        mailbox.on_error = partial(self._refuse, request.request_id)
        self._tickets[request.request_id] = turn.ticket

    async def evict(self, ticket: int) -> None:
        """The engine ends it with "abort", which is told like any other end."""
        request_id = f"turn-{ticket}"
        if request_id not in self._tickets:
            return
        try:
            await self._engine.ask(engine_messages.Evict(request_id))
        except RoseError as error:
            self._refuse(request_id, error)

    def cancel(self, ticket: int) -> None:
        request_id = f"turn-{ticket}"
        if self._tickets.pop(request_id, None) is not None:
            self._engine.cancel([request_id])
        self._gathered.pop(ticket, None)

    def close(self) -> None:
        """The gateway is gone: everything is forgotten."""
        self._engine.on_step = self._others
        if self._timer is not None:
            self._timer.cancel()
        self._engine.cancel(list(self._tickets))
        self._tickets.clear()

    def flush(self) -> None:
        """Tell what has been gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._full += self._gathered.values()
        self._gathered.clear()
        self._tell_full()

    def _tell_full(self) -> None:
        for start in range(0, len(self._full), PIECES_MAX):
            self._say(Tokens(tuple(gathered.piece() for gathered in self._full[start : start + PIECES_MAX])))
        self._full.clear()

    # What the engine does

    def _on_step(self, stepped: engine_messages.Stepped) -> None:
        self._others(stepped)
        self.rates.observe(stepped, self._now_s())
        has_ended = False
        for event in stepped.events:
            ticket = self._tickets.get(event.request_id)
            if ticket is None:
                continue
            for logprob in event.logprobs:
                if not LOWEST <= logprob <= LOG_PROBABILITY_MAX:  # NaN too
                    self._refuse_diverged(event)
                    break
            else:
                has_ended |= self._gather(ticket, event)
        if has_ended:
            self._tell_full()
        if self._gathered and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(gather_s(len(self._tickets)), self.flush)

    def _gather(self, ticket: int, event: TokenEvent) -> bool:
        """Whether this event is the turn's last."""
        gathered = self._gathered.get(ticket)
        if gathered is None or (gathered.version != event.version and event.token_ids):
            if gathered is not None:
                self._full.append(gathered)
            gathered = self._gathered[ticket] = _Gathered(ticket, event.version)
        gathered.token_ids += event.token_ids
        gathered.logprobs += event.logprobs
        gathered.top_logprobs += event.top_logprobs
        if event.cached_tokens is not None:
            gathered.cached_tokens = event.cached_tokens
        if event.finish_reason is None:
            return False
        gathered.finish_reason = event.finish_reason
        self._full.append(self._gathered.pop(ticket))
        del self._tickets[event.request_id]
        return True

    def _refuse_diverged(self, event: TokenEvent) -> None:
        """Refuse only the turns that show that the weights have diverged."""
        self._engine.cancel([event.request_id])
        self._refuse(event.request_id, RequestRefused(f"version `{event.version}` draws tokens of {NO_NUMBER}"))

    def _refuse(self, request_id: str, error: RoseError) -> None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self.flush()  # what came before is still the turn's
            self._say(Refused(ticket, engine_messages.fault_of(error)))
