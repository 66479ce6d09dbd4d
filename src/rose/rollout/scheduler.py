"""Places turns on workers, and places them again when a worker evicts, refuses, loses or does not get on with them.

A turn keeps everything that was told of it, in `Produced`; wherever it goes next it goes on from there, and since
random numbers are keyed by (seed, position) it draws the tokens it would have drawn. Waiting turns stand by the
router's rank and then in the order they first came, so an evicted turn is not sent to the end of the queue. Each
placement is a new ticket, which no other life of the gateway has; what is said about an old one is not heard. Each turn
ends exactly once: with its last token, by an error, or cancelled.

Where a turn goes is for `core.router`, whether it has stalled for `core.stalls`, how quickly turns that lost their
worker go on for `core.pacing`; here the books are kept that they are asked about. There is no clock and no socket: time
is an argument, and members have a `send` that does not wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

import msgspec

from rose.bounds import INT32_MAX
from rose.core.pacing import Pacer
from rose.core.router import Outcome, Place, Router, TurnView, WorkerView
from rose.core.stalls import Stalls
from rose.coserve.messages import error_of
from rose.engines.base import Request, TokenEvent
from rose.errors import QueueFull, RequestRefused, RoseError, Unavailable
from rose.rollout.live import Counts, LiveTurn, Sink
from rose.rollout.messages import Alternatives, Cancel, Evict, Leave, Piece, Refused, Tokens, Turn
from rose.rollout.pool import Member, Pool
from rose.rollout.produced import Produced

RETRY_AFTER_S = 2.0
SWEEP_AT = 64  # turns that were cancelled while they waited stay in the queue until there are this many
LOOK_PAST_MAX = 64  # waiting turns that are looked at after one that finds no room
TOO_MANY = "many turns lost their workers at once, and go on one after the other"
PROMPT_TOKENS_S = 2000.0  # of a worker that has not shown how quickly it computes prompts
HAND_BACK_S = 1.0  # a worker that does not hand a turn back within this time has lost it

_Entry = tuple[int, float, int, LiveTurn]  # priority, rank, order


class Scheduler:
    def __init__(
        self,
        pool: Pool,
        *,
        waiting_max: int,
        wait_s: float,
        router: Router | None = None,
        stalls: Stalls | None = None,
        pacer: Pacer | None = None,
        first_ticket: int = 1,
        vocabulary: int = INT32_MAX,
    ) -> None:
        self.counts = Counts()
        self._pool, self._waiting_max, self._wait_s = pool, waiting_max, wait_s
        self._vocabulary = vocabulary
        self._router = router if router is not None else Router()
        self._stalls = stalls if stalls is not None else Stalls()
        self._pacer = pacer if pacer is not None else Pacer()
        self._turns: dict[str, LiveTurn] = {}
        self._placed: dict[int, LiveTurn] = {}
        self._asked_back: dict[int, LiveTurn] = {}
        self._queue: list[_Entry] = []
        self._queue_again: list[_Entry] = []  # those that lost a worker before, which may have to wait for their turn
        self._waiting = 0
        self._is_full = False  # the first in the queue found no room, and nothing has changed since
        self._is_paced = False  # one that found room has to wait for its turn
        self._orders, self._tickets = itertools.count(), itertools.count(first_ticket)
        self._views: dict[str, WorkerView] = {}  # as the router knows them
        self._reason = "no worker has joined"

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def running(self) -> int:
        return len(self._placed)

    def submit(
        self,
        request: Request,
        sink: Sink,
        now_s: float,
        *,
        affinity: str = "",
        group: str | None = None,
        produced: Produced | None = None,
    ) -> None:
        """Take a turn. `produced` is what an earlier try of the same turn came to."""
        assert request.request_id not in self._turns, f"turn `{request.request_id}` is under way"
        so_far = produced if produced is not None else Produced()
        turn = LiveTurn(request, affinity, group, sink, so_far, next(self._orders), now_s, now_s)
        self._turns[request.request_id] = turn
        self.counts.begun += 1
        self._enqueue(turn)
        if not self._is_full or self._queue[0][-1] is turn:
            self.place(now_s)

    def check_room(self) -> None:
        """Raises QueueFull if too many turns wait already; to be asked before anything is kept of a turn."""
        if self._waiting >= self._waiting_max:
            raise QueueFull(f"{self._waiting} turns are waiting for a worker", retry_after_s=RETRY_AFTER_S)

    def cancel(self, request_ids: Iterable[str], now_s: float) -> None:
        """Forget turns; those that have ended are skipped."""
        for request_id in request_ids:
            turn = self._turns.get(request_id)
            if turn is None:
                continue
            if turn.member is not None:
                turn.member.send(Cancel(turn.ticket))
            self.counts.cancelled += 1
            self._end(turn, "cancelled", now_s)

    def evict(self, request_id: str, now_s: float) -> bool:
        """Have the turn's worker hand it back; it then goes on wherever there is room. False if it is on none."""
        turn = self._turns.get(request_id)
        if turn is None or turn.member is None:
            return False
        self.ask_back(turn, now_s)
        return True

    def drain(self, member: Member, now_s: float) -> None:
        """No more turns for this member; those it has go on elsewhere, then it is told to leave for good."""
        member.draining = True
        self._show(member)
        for ticket in sorted(member.tickets):
            self.ask_back(self._placed[ticket], now_s)
        self._dismiss(member)
        self.place(now_s)

    def finished(self, trajectory_id: str, group: str | None, turns: int, tokens: int) -> None:
        """A trajectory is over: what it says about its group's others is learnt, where its prefix is forgotten."""
        self._router.finished(trajectory_id, group, turns, tokens)

    # What members say

    def changed(self, member: Member, now_s: float) -> None:
        """Something about it is new: it joined, or told how it is."""
        self._show(member)
        self.place(now_s)

    def heard_tokens(self, member: Member, tokens: Tokens, now_s: float) -> None:
        freed, evicted = False, []
        for piece in tokens.pieces:
            turn = self._of(member, piece.ticket)
            if turn is None:
                self.counts.late += 1
            elif piece.token_ids and not self._is_allowed(turn, piece.version):
                freed |= self._drop(turn, piece, now_s)
            else:
                freed |= self._take(turn, piece, now_s)
                if piece.finish_reason == "abort":
                    evicted.append(turn)
        self._tell_pacer(evicted, now_s)
        if freed:
            self._dismiss(member)
            self.place(now_s)

    def heard_refused(self, member: Member, refused: Refused, now_s: float) -> None:
        turn = self._of(member, refused.ticket)
        if turn is None:
            return
        error = error_of(refused.fault)
        if isinstance(error, RequestRefused) and not isinstance(error, QueueFull):
            self._fail(turn, error, now_s)
        else:
            self.counts.refused += 1
            retry_after_s = getattr(error, "retry_after_s", RETRY_AFTER_S)
            self.close(member, now_s + retry_after_s, error.what)
            has_begun = not turn.is_first
            if has_begun:
                self._tell_pacer([turn], now_s)
            self._put_back(turn, "evicted", now_s, has_begun=has_begun)
        self._dismiss(member)
        self.place(now_s)

    def lost(self, member: Member, now_s: float) -> None:
        """The member is gone; its turns go on elsewhere from what it had told of them."""
        self._views.pop(member.name, None)
        self._router.remove_worker(member.name)
        self._stalls.forget(member.name)
        turns = [self._placed[ticket] for ticket in sorted(member.tickets)]
        for turn in turns:
            self.counts.lost += 1
            self._put_back(turn, "lost", now_s)
        self._tell_pacer(turns, now_s)
        self.place(now_s)

    # Placing

    def place(self, now_s: float) -> None:
        """Place waiting turns, first come first, until there is no room for any."""
        self._is_full = self._is_paced = False
        past: list[_Entry] = []
        queues = [self._queue, self._queue_again]
        while any(queues) and len(past) <= LOOK_PAST_MAX:
            queue = min((queue for queue in queues if queue), key=lambda queue: queue[0])
            entry = heapq.heappop(queue)
            turn = entry[-1]
            if not self._is_waiting(turn):
                continue
            view = turn.view()
            decision = self._router.choose(view, now_s)
            if isinstance(decision, Place) and self._pacer.may_place(now_s, turn.is_rerouted):
                self._put_on(turn, view, decision, now_s)
                continue
            past.append(entry)
            if isinstance(decision, Place):
                self._reason, self._is_paced, queues = TOO_MANY, True, [self._queue]
                continue
            self._reason = decision.reason
            if decision.is_for_all:
                self._is_full = len(past) == 1
                break
        for entry in past:
            heapq.heappush(self._queue_of(entry[-1]), entry)

    def next_s(self) -> float | None:
        """When `place` may find room that nothing else tells of."""
        return self._pacer.next_s() if self._is_paced else None

    # What time brings

    def expire(self, now_s: float) -> None:
        """Give up on turns that have waited too long."""
        if not self._waiting:
            return
        late = [
            turn
            for *_, turn in self._queue + self._queue_again
            if self._is_waiting(turn) and self._is_late(turn, now_s)
        ]
        for turn in sorted(late, key=lambda turn: turn.order):
            what = f"no worker took this turn within {self._wait_s:g} s: {self._reason}"
            error = Unavailable(what, hint="GET /v1/pool shows the workers", retry_after_s=RETRY_AFTER_S)
            self._fail(turn, error, now_s)

    def take_overdue(self, now_s: float) -> None:
        """Members that were asked to hand turns back, and did not, have lost them."""
        for turn in [turn for turn in self._asked_back.values() if _since(turn.asked_back_s, now_s) > HAND_BACK_S]:
            self.take_back(turn, now_s)

    def woke(self, now_s: float) -> None:
        """It was the gateway that heard nothing: no turn is to blame for that."""
        for turn in self._placed.values():
            turn.progress_s = now_s
            if turn.asked_back_s is not None:
                turn.asked_back_s = now_s

    # Taking turns from members

    @property
    def placed(self) -> list[LiveTurn]:
        return list(self._placed.values())

    @property
    def asked_back(self) -> int:
        return len(self._asked_back)

    def ask_back(self, turn: LiveTurn, now_s: float) -> None:
        """Have the member hand it back; if it does not, it is taken."""
        assert turn.member is not None
        if turn.asked_back_s is None:
            turn.asked_back_s = now_s
            self._asked_back[turn.ticket] = turn
            turn.member.send(Evict(turn.ticket))

    def take_back(self, turn: LiveTurn, now_s: float) -> None:
        """Without waiting for the member: it is told to forget the turn."""
        assert turn.member is not None
        member = turn.member
        member.send(Cancel(turn.ticket))
        self._put_back(turn, "evicted", now_s)
        self._dismiss(member)

    def close(self, member: Member, until_s: float, why: str) -> None:
        """No turns for this member for a while."""
        member.closed_until_s = max(member.closed_until_s, until_s)
        member.trouble = why
        self._show(member)

    # Books

    def _is_late(self, turn: LiveTurn, now_s: float) -> bool:
        return now_s - turn.waiting_since_s > self._wait_s

    @staticmethod
    def _is_waiting(turn: LiveTurn) -> bool:
        return not turn.is_over and turn.member is None

    def _enqueue(self, turn: LiveTurn) -> None:
        self._waiting += 1
        rank = self._router.rank(turn.view())
        heapq.heappush(self._queue_of(turn), (turn.request.priority, rank, turn.order, turn))

    def _queue_of(self, turn: LiveTurn) -> list[_Entry]:
        return self._queue_again if turn.is_rerouted else self._queue

    def _put_on(self, turn: LiveTurn, view: TurnView, place: Place, now_s: float) -> None:
        member = self._pool.get(place.worker)
        assert member is not None
        self._waiting -= 1
        turn.member, turn.ticket = member, next(self._tickets)
        turn.progress_s, turn.is_first, turn.had_tokens = now_s, True, len(turn.produced)
        turn.predicted_s, turn.version, turn.oldest = place.predicted_s, member.version, self._pool.oldest
        self._placed[turn.ticket] = turn
        if not member.tickets:
            member.progress_s = now_s
        member.tickets.add(turn.ticket)
        member.tokens_held += turn.tokens_max
        self._router.placed(turn.request.request_id, view, member.name, now_s)
        self.counts.placed += 1
        request = turn.request.named(f"turn-{turn.ticket}", turn.produced.partial())
        version = None if self._pool.max_staleness else self._pool.wanted_version
        member.send(Turn(turn.ticket, request, version))

    def _show(self, member: Member) -> None:
        """To the router, if it is news."""
        if not self._pool.has(member):
            return
        view = self._pool.view(member)
        if self._views.get(member.name) != view:
            self._views[member.name], self._is_full = view, False
            self._router.put_worker(view)

    def _tell_pacer(self, turns: Sequence[LiveTurn], now_s: float) -> None:
        """These were just evicted or lost; the others must compute their prompts anew."""
        if not turns:
            return
        views = [view for view in self._views.values() if view.is_open and view.gated_since_s is None]
        able = [view for view in views if now_s >= view.closed_until_s]
        tokens_s = sum(view.prefill_tok_s or self._stalls.prompt_tok_s(view.name) or PROMPT_TOKENS_S for view in able)
        mean_tokens = sum(turn.view().prompt_tokens for turn in turns) / len(turns)
        self._pacer.survivors(len(able), tokens_s / max(1.0, mean_tokens))
        self._pacer.evicted(len(turns), now_s)

    def _of(self, member: Member, ticket: int) -> LiveTurn | None:
        turn = self._placed.get(ticket)
        return turn if turn is not None and turn.member is member else None

    def _is_allowed(self, turn: LiveTurn, version: str) -> bool:
        """The version it was placed on, one that was within the bound then, or one published since; by its hash."""
        assert turn.member is not None
        if self._pool.is_proved(turn.member, version) is False:
            return False
        return version == turn.version or self._pool.is_since(version, turn.oldest or 0)

    def _drop(self, turn: LiveTurn, piece: Piece, now_s: float) -> bool:
        """Tokens of weights that it may not run on: they are not taken, nor is anything more from there."""
        assert turn.member is not None
        self.counts.off_version += 1
        turn.member.trouble = f"it ran a turn on version `{piece.version}`, which is not one to run on"
        self.take_back(turn, now_s)
        return True

    def _check(self, turn: LiveTurn, piece: Piece) -> None:
        """Raises Unavailable for tokens that no engine could have drawn; their worker is then closed."""
        count, most = len(piece.token_ids), turn.request.sampling.max_tokens
        wrong = ""
        if len(piece.logprobs) != count or len(piece.top_logprobs) not in (0, count):
            wrong = f"{count} tokens with {len(piece.logprobs)} log-probabilities"
        elif count and max(piece.token_ids) >= self._vocabulary:
            wrong = f"token id {max(piece.token_ids)} of a vocabulary of {self._vocabulary}"
        elif piece.top_logprobs and self._has_strange(piece.top_logprobs):
            wrong = f"an alternative outside the vocabulary of {self._vocabulary}"
        elif len(turn.produced) + count > most:
            wrong = f"{len(turn.produced) + count} tokens of a turn that asked for {most}"
        elif piece.finish_reason in ("stop", "length") and not len(turn.produced) + count:
            wrong = "the end of a turn without a token"
        if wrong:
            raise Unavailable(f"a worker sent {wrong}")

    def _has_strange(self, top_logprobs: Sequence[Alternatives]) -> bool:
        return any(token_id >= self._vocabulary for entry in top_logprobs for token_id, _ in entry)

    def _take(self, turn: LiveTurn, piece: Piece, now_s: float) -> bool:
        """One piece of a turn; whether its seat is free now. Raises Unavailable."""
        produced, member = turn.produced, turn.member
        assert member is not None
        self._check(turn, piece)
        is_whole = len(produced) + len(piece.token_ids) == turn.request.sampling.max_tokens
        if is_whole and piece.finish_reason not in ("stop", "length"):
            piece = msgspec.structs.replace(piece, finish_reason="length")  # whatever it said: no worker can go on
        produced.add(piece.token_ids, piece.logprobs, piece.version, piece.top_logprobs, member.name)
        self.counts.tokens += len(piece.token_ids)
        first = produced.cached_tokens is None
        if first and piece.cached_tokens is not None:
            produced.cached_tokens = piece.cached_tokens
        is_end = piece.finish_reason in ("stop", "length")
        if piece.token_ids:
            self._got_on(turn, member, now_s)
        event = TokenEvent(
            turn.request.request_id,
            piece.token_ids,
            piece.logprobs,
            piece.version,
            piece.finish_reason if is_end else None,
            piece.top_logprobs,
            piece.cached_tokens if first else None,
            (member.name,) if piece.token_ids else (),
        )
        if is_end:
            self.counts.ended += 1
            member.turns_ended += 1
            self._stalls.ended(member.name)
            self._end(turn, "ended", now_s)
        elif piece.finish_reason == "abort":
            self.counts.evicted += 1
            self._put_back(turn, "evicted", now_s)
        if piece.token_ids or is_end:
            turn.sink.put(event)
        return piece.finish_reason is not None

    def _got_on(self, turn: LiveTurn, member: Member, now_s: float) -> None:
        quiet_s = member.gate.quiet_s(turn.progress_s, now_s)
        first_of = turn.prompt_there if turn.is_first else None
        self._stalls.moved(member.name, quiet_s, now_s, first_of=first_of)
        turn.progress_s = turn.waiting_since_s = member.progress_s = now_s
        turn.is_first = False

    def _put_back(self, turn: LiveTurn, outcome: Outcome, now_s: float, *, has_begun: bool = True) -> None:
        """Into the queue again. Its wait counts from its last progress, so that it is not refused for ever.

        One that never began where it was goes on like any other: pacing is for storms of turns that did.
        """
        self._unseat(turn, outcome, now_s)
        turn.is_rerouted |= has_begun
        self._enqueue(turn)

    def _unseat(self, turn: LiveTurn, outcome: Outcome, now_s: float) -> None:
        if turn.member is None:
            return
        self._is_full = False
        self._router.ended(turn.request.request_id, outcome, len(turn.produced) - turn.had_tokens, now_s)
        turn.member.tickets.discard(turn.ticket)
        turn.member.tokens_held -= turn.tokens_max
        del self._placed[turn.ticket]
        self._asked_back.pop(turn.ticket, None)
        turn.member = turn.asked_back_s = None

    def _end(self, turn: LiveTurn, outcome: Outcome, now_s: float) -> None:
        if self._is_waiting(turn):
            self._waiting -= 1
        turn.is_over = True
        self._unseat(turn, outcome, now_s)
        del self._turns[turn.request.request_id]
        for queue in (self._queue, self._queue_again):
            if len(queue) > 2 * self._waiting + SWEEP_AT:
                queue[:] = [entry for entry in queue if self._is_waiting(entry[-1])]
                heapq.heapify(queue)

    def _fail(self, turn: LiveTurn, error: RoseError, now_s: float) -> None:
        self.counts.failed += 1
        self._end(turn, "cancelled", now_s)
        turn.sink.fail(error)

    def _dismiss(self, member: Member) -> None:
        if member.draining and not member.tickets:
            member.send(Leave("drained"))


def _since(moment_s: float | None, now_s: float) -> float:
    return now_s - moment_s if moment_s is not None else 0.0
