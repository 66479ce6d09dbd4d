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
from rose.rollout.books import Books
from rose.rollout.sessions import KeptTurn


@dataclass(frozen=True, slots=True)
class Expected:
    """One reader of one turn. One who wants it whole is not told of it before it has ended."""

    turn: KeptTurn
    affinity: str
    whole: bool


class TurnDesk:
    """An `EngineHandle`. One per gateway."""

    def __init__(self, books: Books, context_tokens: int, now_s: Callable[[], float]) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self._books, self._now_s = books, now_s
        self._context_tokens = context_tokens
        self._kept: dict[str, Expected] = {}  # by request id
        self._facts: EngineFacts = self._sum_up()

    @property
    def trouble(self) -> Unavailable | None:
        """Return why the ledger cannot be written. Without workers turns wait, and get a 503 after `wait_s`."""
        return self._books.ledger.trouble

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def refresh(self) -> None:
        """Sum up the pool again; whoever changes it calls this."""
        self._facts = self._sum_up()

    def expect(self, turn: KeptTurn, affinity: str, *, whole: bool) -> str:
        """The id for one more reader of this turn; to be forgotten when the reader is gone."""
        request_id = self._books.next_try(turn)
        self._kept[request_id] = Expected(turn, affinity, whole)
        return request_id

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        mailbox = Mailbox()
        for request in requests:
            known = self._kept.get(request.request_id)
            if known is None:
                self._books.scheduler.check_room()
                self._books.scheduler.submit(request, mailbox, self._now_s())
            else:
                self._books.turn(
                    known.turn, request, mailbox, self._now_s(), affinity=known.affinity, whole=known.whole
                )
        return mailbox

    def cancel(self, request_ids: Iterable[str]) -> None:
        """A reader has left, or has seen enough."""
        for request_id in list(request_ids):
            known = self._kept.get(request_id)
            if known is None:
                self._books.scheduler.cancel([request_id], self._now_s())
            else:
                known.turn.forget(request_id)

    def forget(self, request_id: str) -> None:
        """This reader of a kept turn will not come again."""
        known = self._kept.pop(request_id, None)
        if known is not None:
            known.turn.forget(request_id)

    def cut(self, turn: KeptTurn, tokens: int) -> None:
        """The turn ends here: its text met a stop string, which the engine knows nothing of."""
        self._books.cut(turn, tokens, self._now_s())

    async def close(self) -> None:
        """The workers are not the gateway's to stop."""

    def _sum_up(self) -> EngineFacts:
        """All members together. What a borrowed one lends changes, so memory says nothing about the longest context."""
        members, scheduler = list(self._books.pool), self._books.scheduler
        beats = [member.beat for member in members if member.beat is not None]
        context = max((member.context_tokens for member in members), default=None)
        return EngineFacts(
            version=self._books.version,
            running=scheduler.running,
            waiting=scheduler.waiting,
            kv_blocks_limit=max(sum(member.kv_tokens for member in members), context or self._context_tokens),
            kv_blocks_used=sum(beat.kv_used_tokens for beat in beats),
            kv_blocks_cached=0,
            block_tokens=1,
            block_bytes=0,
            max_context_tokens=context or self._context_tokens,
            generated_tokens=scheduler.counts.tokens,
        )
