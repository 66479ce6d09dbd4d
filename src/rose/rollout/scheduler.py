"""Places turns on workers, and places them again when a worker evicts, refuses or loses them.

A turn keeps everything that was told of it, in `Produced`; wherever it goes next it goes on from there, and since
random numbers are keyed by (seed, position) it draws the tokens it would have drawn. Waiting turns stand in the order
they first came, whatever happened to them since, so an evicted turn is not sent to the end of the queue. Each placement
is a new ticket; what is said about an old one is not heard. Each turn ends exactly once: with its last token, by an
error, or cancelled.

There is no clock and no socket here: time is an argument, and members have a `send` that does not wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from rose.core.router import Place, TurnView, choose
from rose.coserve.messages import error_of
from rose.engines.base import Request, TokenEvent
from rose.errors import QueueFull, RequestRefused, RoseError, Unavailable
from rose.rollout.messages import Cancel, Evict, Leave, Piece, Refused, Tokens, Turn
from rose.rollout.pool import Member, Pool
from rose.rollout.produced import Produced

RETRY_AFTER_S = 2.0
SWEEP_AT = 64  # turns that were cancelled while they waited stay in the queue until there are this many


class Sink(Protocol):
    """Who is told what becomes of a turn: events, the last with a finish reason, or an error instead of the rest."""

    def put(self, event: TokenEvent) -> None: ...

    def fail(self, error: RoseError) -> None: ...


@dataclass(slots=True, eq=False)
class LiveTurn:
    """One turn that has not ended. Without a member it waits, since `waiting_since_s`."""

    request: Request
    affinity: str
    sink: Sink
    produced: Produced
    order: int
    began_s: float
    waiting_since_s: float
    member: Member | None = None
    ticket: int = 0
    is_over: bool = False

    @property
    def tokens_max(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@dataclass(slots=True)
class Counts:
    """They only grow. begun = ended + failed + cancelled + those under way."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    placed: int = 0
    evicted: int = 0  # handed back by a worker
    refused: int = 0
    lost: int = 0  # with the worker that ran them
    late: int = 0  # pieces of turns that had been taken from the worker
    tokens: int = 0


class Scheduler:
    def __init__(self, pool: Pool, *, waiting_max: int, wait_s: float) -> None:
        self.counts = Counts()
        self._pool, self._waiting_max, self._wait_s = pool, waiting_max, wait_s
        self._turns: dict[str, LiveTurn] = {}
        self._placed: dict[int, LiveTurn] = {}
        self._queue: list[tuple[int, int, LiveTurn]] = []
        self._waiting = 0
        self._orders, self._tickets = itertools.count(), itertools.count(1)
        self._last_worker: dict[str, str] = {}
        self._reason = "no worker has joined"

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def running(self) -> int:
        return len(self._placed)

    def submit(
        self, request: Request, sink: Sink, now_s: float, *, affinity: str = "", produced: Produced | None = None
    ) -> None:
        """Take a turn. Raises QueueFull; `produced` is what an earlier try of the same turn came to."""
        assert request.request_id not in self._turns, f"turn `{request.request_id}` is under way"
        if self._waiting >= self._waiting_max:
            raise QueueFull(f"{self._waiting} turns are waiting for a worker", retry_after_s=RETRY_AFTER_S)
        turn = LiveTurn(
            request, affinity, sink, produced if produced is not None else Produced(), next(self._orders), now_s, now_s
        )
        self._turns[request.request_id] = turn
        self.counts.begun += 1
        self._enqueue(turn)
        self.place(now_s)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget turns; those that have ended are skipped."""
        for request_id in request_ids:
            turn = self._turns.get(request_id)
            if turn is None:
                continue
            if turn.member is not None:
                turn.member.send(Cancel(turn.ticket))
            self.counts.cancelled += 1
            self._end(turn)

    def evict(self, request_id: str) -> bool:
        """Have the turn's worker hand it back; it then goes on wherever there is room. False if it is on none."""
        turn = self._turns.get(request_id)
        if turn is None or turn.member is None:
            return False
        turn.member.send(Evict(turn.ticket))
        return True

    def drain(self, member: Member, now_s: float) -> None:
        """No more turns for this member; those it has go on elsewhere, then it is told to leave for good."""
        member.draining = True
        for ticket in sorted(member.tickets):
            member.send(Evict(ticket))
        self._dismiss(member)
        self.place(now_s)

    def forget_affinity(self, affinity: str) -> None:
        self._last_worker.pop(affinity, None)

    # What members say

    def heard_tokens(self, member: Member, tokens: Tokens, now_s: float) -> None:
        freed = False
        for piece in tokens.pieces:
            turn = self._of(member, piece.ticket)
            if turn is None:
                self.counts.late += 1
                continue
            freed |= self._take(turn, piece, now_s)
        if freed:
            self._dismiss(member)
            self.place(now_s)

    def heard_refused(self, member: Member, refused: Refused, now_s: float) -> None:
        turn = self._of(member, refused.ticket)
        if turn is None:
            return
        error = error_of(refused.fault)
        if isinstance(error, RequestRefused) and not isinstance(error, QueueFull):
            self._fail(turn, error)
        else:
            self.counts.refused += 1
            retry_after_s = getattr(error, "retry_after_s", RETRY_AFTER_S)
            member.closed_until_s = max(member.closed_until_s, now_s + retry_after_s)
            member.trouble = error.what
            self._put_back(turn, now_s)
        self._dismiss(member)
        self.place(now_s)

    def lost(self, member: Member, now_s: float) -> None:
        """The member is gone; its turns go on elsewhere from what it had told of them."""
        for ticket in sorted(member.tickets):
            self.counts.lost += 1
            self._put_back(self._placed[ticket], now_s)
        self.place(now_s)

    # Placing

    def place(self, now_s: float) -> None:
        """Place waiting turns, first come first, until one finds no room."""
        while self._queue:
            turn = self._queue[0][2]
            if turn.is_over or turn.member is not None:
                heapq.heappop(self._queue)
                continue
            views = self._pool.views()
            last_worker = self._last_worker.get(turn.affinity) if turn.affinity else None
            decision = choose(TurnView(turn.tokens_max, last_worker), views, now_s)
            if not isinstance(decision, Place):
                self._reason = decision.reason
                return
            heapq.heappop(self._queue)
            member = self._pool.get(decision.worker)
            assert member is not None
            self._put_on(turn, member)

    def expire(self, now_s: float) -> None:
        """Give up on turns that have waited too long."""
        if not self._waiting:
            return
        late = [turn for _, _, turn in self._queue if self._is_waiting(turn) and self._is_late(turn, now_s)]
        for turn in sorted(late, key=lambda turn: turn.order):
            what = f"no worker took this turn within {self._wait_s:g} s: {self._reason}"
            self._fail(turn, Unavailable(what, hint="GET /v1/pool shows the workers", retry_after_s=RETRY_AFTER_S))

    def _is_late(self, turn: LiveTurn, now_s: float) -> bool:
        return now_s - turn.waiting_since_s > self._wait_s

    @staticmethod
    def _is_waiting(turn: LiveTurn) -> bool:
        return not turn.is_over and turn.member is None

    def _enqueue(self, turn: LiveTurn) -> None:
        self._waiting += 1
        heapq.heappush(self._queue, (turn.request.priority, turn.order, turn))

    def _put_on(self, turn: LiveTurn, member: Member) -> None:
        self._waiting -= 1
        turn.member, turn.ticket = member, next(self._tickets)
        self._placed[turn.ticket] = turn
        member.tickets.add(turn.ticket)
        member.tokens_held += turn.tokens_max
        if turn.affinity:
            self._last_worker[turn.affinity] = member.name
        self.counts.placed += 1
        request = replace(turn.request, request_id=f"turn-{turn.ticket}", partial=turn.produced.partial())
        member.send(Turn(turn.ticket, request, self._pool.wanted_version))

    def _of(self, member: Member, ticket: int) -> LiveTurn | None:
        turn = self._placed.get(ticket)
        return turn if turn is not None and turn.member is member else None

    def _take(self, turn: LiveTurn, piece: Piece, now_s: float) -> bool:
        """One piece of a turn; whether its seat is free now."""
        produced = turn.produced
        produced.add(piece.token_ids, piece.logprobs, piece.version, piece.top_logprobs)
        self.counts.tokens += len(piece.token_ids)
        first = produced.cached_tokens is None
        if first and piece.cached_tokens is not None:
            produced.cached_tokens = piece.cached_tokens
        is_end = piece.finish_reason in ("stop", "length")
        if piece.token_ids:
            turn.waiting_since_s = now_s
        event = TokenEvent(
            turn.request.request_id,
            piece.token_ids,
            piece.logprobs,
            piece.version,
            piece.finish_reason if is_end else None,
            piece.top_logprobs,
            piece.cached_tokens if first else None,
        )
        if is_end:
            self.counts.ended += 1
            if turn.member is not None:
                turn.member.turns_ended += 1
            self._end(turn)
        elif piece.finish_reason == "abort":
            self.counts.evicted += 1
            self._put_back(turn, now_s)
        if piece.token_ids or is_end:
            turn.sink.put(event)
        return piece.finish_reason is not None

    def _put_back(self, turn: LiveTurn, now_s: float) -> None:
        """Into the queue again. Its wait counts from its last progress, so that it is not refused for ever."""
        self._unseat(turn)
        self._enqueue(turn)

    def _unseat(self, turn: LiveTurn) -> None:
        if turn.member is None:
            return
        turn.member.tickets.discard(turn.ticket)
        turn.member.tokens_held -= turn.tokens_max
        del self._placed[turn.ticket]
        turn.member = None

    def _end(self, turn: LiveTurn) -> None:
        if self._is_waiting(turn):
            self._waiting -= 1
        turn.is_over = True
        self._unseat(turn)
        del self._turns[turn.request.request_id]
        if len(self._queue) > 2 * self._waiting + SWEEP_AT:
            self._queue = [entry for entry in self._queue if self._is_waiting(entry[2])]
            heapq.heapify(self._queue)

    def _fail(self, turn: LiveTurn, error: RoseError) -> None:
        self.counts.failed += 1
        self._end(turn)
        turn.sink.fail(error)

    def _dismiss(self, member: Member) -> None:
        if member.draining and not member.tickets:
            member.send(Leave("drained"))
