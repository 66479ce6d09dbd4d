"""The pool as one engine: what lets a gateway answer with the same code as a device.

A request id that the desk knows belongs to a turn of a trajectory: it is run once, however many readers ask for it, and
goes on when its reader leaves, so that the reader who comes back finds the answer. Any other request is a single turn
that nobody keeps, cancelled when its reader leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rose.coserve.mailbox import Mailbox
from rose.engines.base import EngineFacts, Request
from rose.errors import Unavailable
from rose.rollout.pool import Pool
from rose.rollout.scheduler import Scheduler
from rose.rollout.trajectories import KeptTurn

NO_VERSION_YET = "0"  # what devices call the weights they were started with


@dataclass(frozen=True, slots=True)
class Expected:
    """One reader of one turn. One who wants it whole is not told of it before it has ended."""

    turn: KeptTurn
    affinity: str
    whole: bool


class TurnDesk:
    """An `EngineHandle`. One per gateway."""

    def __init__(self, pool: Pool, scheduler: Scheduler, context_tokens: int, now_s: Callable[[], float]) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self._pool, self._scheduler, self._now_s = pool, scheduler, now_s
        self._context_tokens = context_tokens
        self._kept: dict[str, Expected] = {}  # by request id
        self._facts: EngineFacts = self._sum_up()

    @property
    def trouble(self) -> Unavailable | None:
        return None  # without workers turns wait, and are told so in their own time

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def refresh(self) -> None:
        """Sum up the pool again; whoever changes it calls this."""
        self._facts = self._sum_up()

    def expect(self, turn: KeptTurn, affinity: str, *, whole: bool) -> str:
        """The id for one more reader of this turn; to be forgotten when the reader is gone."""
        request_id = f"{turn.key}#{turn.tries}"
        turn.tries += 1
        self._kept[request_id] = Expected(turn, affinity, whole)
        return request_id

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        mailbox = Mailbox()
        for request in requests:
            known = self._kept.get(request.request_id)
            if known is None:
                self._scheduler.submit(request, mailbox, self._now_s())
            else:
                self._attach(known, request, mailbox)
        return mailbox

    def cancel(self, request_ids: Iterable[str]) -> None:
        """A reader has left, or has seen enough."""
        for request_id in list(request_ids):
            known = self._kept.get(request_id)
            if known is None:
                self._scheduler.cancel([request_id])
            else:
                known.turn.forget(request_id)

    def forget(self, request_id: str) -> None:
        """This reader of a kept turn will not come again."""
        known = self._kept.pop(request_id, None)
        if known is not None:
            known.turn.forget(request_id)

    def cut(self, turn: KeptTurn, tokens: int) -> None:
        """The turn ends here: its text met a stop string, which the engine knows nothing of."""
        if turn.is_running:
            self._scheduler.cancel([turn.run_id])
        turn.is_running = False
        turn.produced.cut(tokens)
        turn.finish_reason = "stop"

    def abandon(self, turns: Iterable[KeptTurn]) -> None:
        """Their trajectory is over: nobody will read them."""
        for turn in turns:
            if turn.is_running:
                self._scheduler.cancel([turn.run_id])
                turn.fail(Unavailable("the trajectory was finished while this turn ran"))

    async def close(self) -> None:
        """The workers are not the gateway's to stop."""

    def _attach(self, known: Expected, request: Request, mailbox: Mailbox) -> None:
        turn = known.turn
        if turn.finish_reason is not None or not known.whole:
            turn.replay(request.request_id, mailbox, self._facts.version)
        if turn.finish_reason is not None:
            return
        if not turn.is_running:
            self._scheduler.submit(request, turn, self._now_s(), affinity=known.affinity, produced=turn.produced)
            turn.is_running, turn.run_id = True, request.request_id
        (turn.waiters if known.whole else turn.readers)[request.request_id] = mailbox

    def _sum_up(self) -> EngineFacts:
        """All members together; the longest context is that of the roomiest."""
        members = list(self._pool)
        beats = [member.beat for member in members if member.beat is not None]
        context = max((min(m.context_tokens, m.kv_tokens or m.context_tokens) for m in members), default=None)
        versions = [member.version for member in members]
        return EngineFacts(
            version=self._pool.wanted_version or (versions[0] if versions else NO_VERSION_YET),
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_blocks_limit=max(sum(member.kv_tokens for member in members), context or self._context_tokens),
            kv_blocks_used=sum(beat.kv_used_tokens for beat in beats),
            kv_blocks_cached=0,
            block_tokens=1,
            block_bytes=0,
            max_context_tokens=context or self._context_tokens,
            generated_tokens=self._scheduler.counts.tokens,
        )
