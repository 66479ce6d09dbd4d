"""Places turns on workers, and again when a worker evicts, refuses, loses or stalls them.

A turn keeps everything that was received of it in its `PartialOutput` and continues from there on the next worker.
Since random numbers are keyed by (seed, position), it samples the tokens that it would have sampled. Waiting turns are
ordered by the router's rank and then by arrival, so an evicted turn does not return to the end of the queue. Each
placement has a new attempt id, unique over all incarnations of the gateway, and messages about an old one are ignored.
Each turn ends exactly once: with its last token, by an error, or cancelled.

`core.router` decides where a turn goes, `core.stalls` whether it has stalled, and `core.pacing` how fast turns that
lost their worker are placed again. This module has no clock and no socket: time is an argument, and a worker's `send`
does not block.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

from rose.api.faults import error_of
from rose.api.worker_messages import (
    CancelTurn,
    EvictTurn,
    Leave,
    Move,
    TokensAdded,
    Turn,
    TurnRefused,
    TurnTokens,
)
from rose.bounds import INT32_MAX
from rose.core.router import Router
from rose.core.routing_rules import NO_VERSION, Outcome, Place, TurnView
from rose.core.stalls import Pacer, Stalls
from rose.core.versions import has_waited_long
from rose.core.worker_table import WorkerView
from rose.engines.base import Request, TokenEvent
from rose.errors import QueueFull, RequestRefused, RoseError, Unavailable, VersionUnavailable
from rose.gateway.pool import NO_VERSION_YET, Pool, PoolWorker
from rose.gateway.turn_state import Counts, LiveTurn, PartialOutput, Sink, check_piece

RETRY_AFTER_S = 2.0
SWEEP_AT = 64  # turns that were cancelled while they waited stay in the queue until there are this many
LOOK_PAST_MAX = 64  # waiting turns that are tried after one that finds no room
TOO_MANY = "many turns lost their workers at once, and are placed again one after the other"
PROMPT_TOKENS_S = 2000.0  # of a worker that has not shown how quickly it computes prompts
HAND_BACK_S = 1.0  # a worker that does not hand a turn back within this time has lost it

_Entry = tuple[int, float, int, LiveTurn]  # priority, rank, order


class Scheduler:
    """The queue of waiting turns and the placed ones; the only writer of `PoolWorker.placement`."""

    def __init__(
        self,
        pool: Pool,
        *,
        waiting_max: int,
        wait_s: float,
        version_wait_s: float = math.inf,
        router: Router | None = None,
        stalls: Stalls | None = None,
        first_attempt_id: int = 1,
        vocabulary: int = INT32_MAX,
    ) -> None:
        self.counts = Counts()
        self._pool, self._waiting_max, self._wait_s = pool, waiting_max, wait_s
        self._version_wait_s = version_wait_s
        self._vocabulary = vocabulary
        self._router = router if router is not None else Router()
        self._stalls = stalls if stalls is not None else Stalls()
        self._pacer = Pacer()
        self._turns: dict[str, LiveTurn] = {}
        self._placed: dict[int, LiveTurn] = {}
        self._evicting: dict[int, LiveTurn] = {}  # that their workers were asked to hand back
        self._queue: list[_Entry] = []
        self._queue_again: list[_Entry] = []  # turns that lost a worker; placing them is paced
        self._queue_demanding: list[_Entry] = []  # turns that demand weights: they delay each other at most
        self._versionless: dict[int, _Entry] = {}  # turns whose weights no worker runs, until some worker takes others
        self.waiting = 0  # turns without a worker
        self.is_held = False  # the trainer has paused: no turn is placed
        self._is_full = False  # the first in the queue found no room, and nothing has changed since
        self._is_paced = False  # a turn that found room must wait for the pacer
        self._orders, self._attempt_ids = itertools.count(), itertools.count(first_attempt_id)
        self._views: dict[str, WorkerView] = {}  # as the router has them
        self._reason = "no worker has joined"

    @property
    def running(self) -> int:
        return len(self._placed)

    @property
    def evicting(self) -> int:
        return len(self._evicting)

    @property
    def placed(self) -> list[LiveTurn]:
        return list(self._placed.values())

    # Requests

    def has(self, request_id: str) -> bool:
        """Return whether this turn is waiting or placed."""
        return request_id in self._turns

    def submit(
        self,
        request: Request,
        sink: Sink,
        now_s: float,
        *,
        affinity: str = "",
        group: str | None = None,
        produced: PartialOutput | None = None,
    ) -> None:
        """Accept a turn. `produced` is the output of an earlier try of the same turn."""
        assert request.request_id not in self._turns, f"turn `{request.request_id}` is under way"
        so_far = produced if produced is not None else PartialOutput()
        turn = LiveTurn(request, affinity, group, sink, so_far, next(self._orders), now_s)
        self._turns[request.request_id] = turn
        self.counts.begun += 1
        self._enqueue(turn)
        if not self._is_full or (self._queue and self._queue[0][-1] is turn):
            self.place(now_s)

    def check_room(self) -> None:
        """Raise QueueFull if too many turns wait; to be called before anything of a turn is kept."""
        if self.waiting >= self._waiting_max:
            raise QueueFull(f"{self.waiting} turns are waiting for a worker", retry_after_s=RETRY_AFTER_S)

    def cancel(self, request_ids: Iterable[str], now_s: float) -> None:
        """Forget turns; ended ones are skipped."""
        for request_id in request_ids:
            turn = self._turns.get(request_id)
            if turn is None:
                continue
            if turn.worker is not None:
                turn.worker.send(CancelTurn(turn.attempt_id))
            self.counts.cancelled += 1
            self._end(turn, "cancelled", now_s)

    def evict(self, request_id: str, now_s: float) -> bool:
        """Ask the turn's worker to hand it back; it then continues wherever there is room. False if it has none."""
        turn = self._turns.get(request_id)
        if turn is None or turn.worker is None:
            return False
        self._request_eviction(turn, now_s)
        return True

    # Workers

    def update_worker(self, worker: PoolWorker, now_s: float, *others: PoolWorker) -> None:
        """Use the new state of a worker, or of many: it joined, reported something, or was given an order."""
        for one in (worker, *others):
            self._update_view(one)
        self.place(now_s)

    def reopen_worker(self, worker: PoolWorker, now_s: float) -> None:
        """End the pause after a refusal: the worker's gate has opened since."""
        worker.placement.closed_until_s = min(worker.placement.closed_until_s, now_s)

    def close_worker(self, worker: PoolWorker, until_s: float, reason: str) -> None:
        """Place no turns on this worker for a while."""
        worker.placement.closed_until_s = max(worker.placement.closed_until_s, until_s)
        worker.placement.trouble = reason
        self._update_view(worker)

    def clear_trouble(self, worker: PoolWorker) -> None:
        worker.placement.trouble = ""

    def drain(self, worker: PoolWorker, now_s: float, *, move_to: int | None = None) -> None:
        """Place no more turns on this worker, move its turns elsewhere, then tell it to leave, or to join a shard."""
        worker.placement.is_draining, worker.placement.move_to = True, move_to
        self._update_view(worker)
        for attempt_id in sorted(worker.placement.attempt_ids):
            self._request_eviction(self._placed[attempt_id], now_s)
        self._dismiss_drained(worker)
        self.place(now_s)

    def remove_worker(self, worker: PoolWorker, now_s: float) -> None:
        """Continue the turns of a worker that is gone elsewhere, from what was received of them."""
        self._views.pop(worker.name, None)
        self._router.remove_worker(worker.name)
        self._stalls.forget(worker.name)
        turns = [self._placed[attempt_id] for attempt_id in sorted(worker.placement.attempt_ids)]
        for turn in turns:
            self.counts.lost += 1
            self._put_back(turn, "lost", now_s)
        self._update_pacer(turns, now_s)
        self.place(now_s)

    def receive_tokens(self, worker: PoolWorker, tokens: TokensAdded, now_s: float) -> None:
        """Add tokens to the worker's turns. Raises Unavailable for tokens that no engine could have sampled."""
        has_room, evicted = False, []
        for piece in tokens.pieces:
            turn = self._turn_on(worker, piece.attempt_id)
            if turn is None:
                self.counts.late += 1
            elif piece.token_ids and not self._is_allowed(turn, worker, piece.version):
                self.counts.off_version += 1
                worker.placement.trouble = f"it ran a turn on version `{piece.version}`, which is out of bounds"
                self.reclaim(turn, now_s)
                has_room = True
            elif piece.token_ids and not self._pool.allows(turn.request.sampling, piece.version):
                self.reclaim(turn, now_s)
                has_room = True
            else:
                has_room |= self._take(turn, worker, piece, now_s)
                if piece.finish_reason == "abort":
                    evicted.append(turn)
        self._update_pacer(evicted, now_s)
        if has_room:
            self._dismiss_drained(worker)
            self.place(now_s)

    def receive_refusal(self, worker: PoolWorker, refused: TurnRefused, now_s: float) -> None:
        """Fail a turn that no worker could run; close the worker and place the turn elsewhere otherwise."""
        turn = self._turn_on(worker, refused.attempt_id)
        if turn is None:
            return
        error = error_of(refused.fault)
        if isinstance(error, RequestRefused) and not isinstance(error, QueueFull):
            self._fail(turn, error, now_s)
        else:
            self.counts.refused += 1
            self.close_worker(worker, now_s + getattr(error, "retry_after_s", RETRY_AFTER_S), error.what)
            has_begun = not turn.is_first
            if has_begun:
                self._update_pacer([turn], now_s)
            self._put_back(turn, "evicted", now_s, has_begun=has_begun)
        self._dismiss_drained(worker)
        self.place(now_s)

    # Placing

    def hold(self) -> None:
        """Place no turns until `release`; those that run continue, and those that wait do not expire."""
        self.is_held, self._is_paced = True, False

    def release(self, now_s: float) -> None:
        """Place turns again; those that waited have their time again."""
        if self.is_held:
            self.is_held = False
            for turn in self._turns.values():
                turn.waiting_since_s = now_s if turn.is_waiting else turn.waiting_since_s
            self.place(now_s)

    def place(self, now_s: float) -> None:
        """Place waiting turns in order, until there is no room for any."""
        self._is_full = self._is_paced = False
        if self.is_held:
            return
        past: list[_Entry] = []
        past_demanding: list[_Entry] = []
        queues = [self._queue, self._queue_again, self._queue_demanding]
        while any(queues) and len(past) <= LOOK_PAST_MAX:
            queue = min((queue for queue in queues if queue), key=lambda queue: queue[0])
            entry = heapq.heappop(queue)
            turn = entry[-1]
            if not turn.is_waiting:
                continue
            view = turn.view(self._pool.demand_of(turn.request.sampling))
            decision = self._router.choose(view, now_s)
            if isinstance(decision, Place) and self._pacer.may_place(now_s, turn.is_rerouted):
                self._put_on(turn, view, decision, now_s)
                continue
            if decision is NO_VERSION:
                self._versionless[turn.order] = entry
                continue
            (past_demanding if queue is self._queue_demanding else past).append(entry)
            if isinstance(decision, Place):
                self._reason, self._is_paced, queues = TOO_MANY, True, [self._queue]
                continue
            self._reason = decision.reason
            if decision.is_for_all:
                self._is_full = len(past) + len(past_demanding) == 1
                break
            if len(past_demanding) > LOOK_PAST_MAX:
                queues = [known for known in queues if known is not self._queue_demanding]
        for entry in past + past_demanding:
            self._push(entry)

    def next_s(self) -> float | None:
        """Return when `place` may find room that no message announces."""
        return self._pacer.next_s() if self._is_paced else None

    def _push(self, entry: _Entry) -> None:
        turn = entry[-1]
        queue = self._queue_again if turn.is_rerouted else self._queue
        heapq.heappush(self._queue_demanding if turn.request.sampling.demands_version else queue, entry)

    def _enqueue(self, turn: LiveTurn) -> None:
        self.waiting += 1
        self._push((turn.request.priority, self._router.rank(turn.view()), turn.order, turn))

    def _put_on(self, turn: LiveTurn, view: TurnView, place: Place, now_s: float) -> None:
        worker = self._pool.get(place.worker)
        assert worker is not None
        self.waiting -= 1
        turn.worker, turn.attempt_id = worker, next(self._attempt_ids)
        turn.progress_s, turn.is_first, turn.had_tokens = now_s, True, len(turn.produced)
        turn.predicted_s, turn.version, turn.oldest = place.predicted_s, worker.weights.version, self._pool.oldest
        self._placed[turn.attempt_id] = turn
        placement = worker.placement
        if not placement.attempt_ids:
            placement.progress_s = now_s
        placement.attempt_ids.add(turn.attempt_id)
        self._router.on_placed(turn.request.request_id, view, worker.name, now_s)
        self.counts.placed += 1
        request = turn.request.named(f"turn-{turn.attempt_id}", turn.produced.partial())
        exact = None if self._pool.max_staleness else self._pool.newest_version
        worker.send(Turn(turn.attempt_id, request, request.sampling.weight_version or exact))

    def _update_view(self, worker: PoolWorker) -> None:
        if not self._pool.has(worker):
            return
        view, before = self._pool.view(worker), self._views.get(worker.name)
        if before != view:
            self._views[worker.name], self._is_full = view, False
            self._router.put_worker(view)
            if before is None or before.version_number != view.version_number or before.version != view.version:
                for entry in self._versionless.values():
                    self._push(entry)
                self._versionless.clear()

    def _update_pacer(self, turns: Sequence[LiveTurn], now_s: float) -> None:
        """Tell the pacer that these turns were evicted or lost; other workers must compute their prompts again."""
        if not turns:
            return
        views = [view for view in self._views.values() if view.is_open and view.blocked_since_s is None]
        able = [view for view in views if now_s >= view.closed_until_s]
        tokens_s = sum(view.prefill_tok_s or self._stalls.prompt_tok_s(view.name) or PROMPT_TOKENS_S for view in able)
        mean_tokens = sum(turn.view().prompt_tokens for turn in turns) / len(turns)
        self._pacer.set_capacity(len(able), tokens_s / max(1.0, mean_tokens))
        self._pacer.on_evicted(len(turns), now_s)

    # Time

    def expire(self, now_s: float) -> None:
        """Fail turns that have waited too long."""
        if not self.waiting or self.is_held:
            return
        entries = [*self._queue, *self._queue_again, *self._queue_demanding, *self._versionless.values()]
        turns = [entry[-1] for entry in entries]
        for turn in sorted(turns, key=lambda turn: turn.order):
            if turn.is_waiting and (error := self._overdue(turn, now_s)) is not None:
                self._fail(turn, error, now_s)

    def _overdue(self, turn: LiveTurn, now_s: float) -> RoseError | None:
        """Return the error of a turn that has waited too long; None if it may wait."""
        waited_s, sampling = now_s - turn.waiting_since_s, turn.request.sampling
        version_wait_s = 0.0 if self._pool.is_gone(sampling.weight_version) else self._version_wait_s
        if waited_s <= min(self._wait_s, version_wait_s):
            return None
        has_version = self._pool.has_version(sampling)
        if not has_waited_long(waited_s, self._wait_s, version_wait_s, has_version=has_version):
            return None
        if has_version:
            what = f"no worker took this turn within {self._wait_s:g} s: {self._reason}"
            return Unavailable(what, hint="GET /v1/pool shows the workers", retry_after_s=RETRY_AFTER_S)
        wanted, newest = sampling.weight_version or sampling.min_weight_version, self._pool.newest_version
        newest = newest or NO_VERSION_YET
        what = f"no worker ran version `{wanted[:80]}` within {version_wait_s:g} s; the newest is `{newest}`"
        return VersionUnavailable(what, newest=newest)

    def reclaim_overdue(self, now_s: float) -> None:
        """Reclaim turns that workers were asked to hand back and did not."""
        for turn in list(self._evicting.values()):
            if turn.eviction_s is not None and now_s - turn.eviction_s > HAND_BACK_S:
                self.reclaim(turn, now_s)

    def restart_timers(self, now_s: float) -> None:
        """Give every turn its time again after the gateway itself stood still."""
        for turn in self._placed.values():
            turn.progress_s = now_s
            if turn.eviction_s is not None:
                turn.eviction_s = now_s

    def reclaim(self, turn: LiveTurn, now_s: float) -> None:
        """Take a turn from its worker without waiting for it, and place it again."""
        worker = turn.worker
        assert worker is not None
        worker.send(CancelTurn(turn.attempt_id))
        self._update_pacer([turn], now_s)
        self._put_back(turn, "evicted", now_s)
        self._dismiss_drained(worker)

    def _request_eviction(self, turn: LiveTurn, now_s: float) -> None:
        assert turn.worker is not None
        if turn.eviction_s is None:
            turn.eviction_s = now_s
            self._evicting[turn.attempt_id] = turn
            turn.worker.send(EvictTurn(turn.attempt_id))

    # Tokens

    def _turn_on(self, worker: PoolWorker, attempt_id: int) -> LiveTurn | None:
        turn = self._placed.get(attempt_id)
        return turn if turn is not None and turn.worker is worker else None

    def _is_allowed(self, turn: LiveTurn, worker: PoolWorker, version: str) -> bool:
        """Return whether the turn may have tokens of this version.

        It may have those of the version that it was placed on, of one that was within the bound then, and of one
        published since, unless the worker's hash is wrong.
        """
        if self._pool.is_verified(worker, version) is False:
            return False
        return version == turn.version or self._pool.is_since(version, turn.oldest or 0)

    def _take(self, turn: LiveTurn, worker: PoolWorker, piece: TurnTokens, now_s: float) -> bool:
        """Add one piece to its turn. Return whether the turn has left the worker. Raises Unavailable."""
        check_piece(turn, piece, self._vocabulary)
        produced, name, count, finish_reason = turn.produced, worker.name, len(piece.token_ids), piece.finish_reason
        is_whole = len(produced.token_ids) + count == turn.request.sampling.max_tokens
        if is_whole and finish_reason != "stop":
            finish_reason = "length"  # no worker can add to it
        produced.add(piece.token_ids, piece.logprobs, piece.version, piece.top_logprobs, name)
        self.counts.tokens += count
        is_first = produced.cached_tokens is None
        if is_first and piece.cached_tokens is not None:
            produced.cached_tokens = piece.cached_tokens
        if piece.prompt_logprobs:
            produced.prompt_logprobs = piece.prompt_logprobs
        is_end = finish_reason is not None and finish_reason != "abort"
        if count:
            quiet_s = worker.gate.quiet_s(turn.progress_s, now_s)
            self._stalls.on_progress(name, quiet_s, now_s, first_of=turn.first_of)
            turn.progress_s = turn.waiting_since_s = worker.placement.progress_s = now_s
            turn.is_first = False
        event = TokenEvent(
            turn.request.request_id,
            piece.token_ids,
            piece.logprobs,
            piece.version,
            finish_reason if is_end else None,
            piece.top_logprobs,
            piece.cached_tokens if is_first else None,
            (name,) if count else (),
            piece.prompt_logprobs,
        )
        if is_end:
            self.counts.ended += 1
            worker.placement.turns_ended += 1
            self._stalls.on_ended(name)
            self._end(turn, "ended", now_s)
        elif finish_reason == "abort":
            self.counts.evicted += 1
            self._put_back(turn, "evicted", now_s)
        if count or is_end:
            turn.sink.put(event)
        return finish_reason is not None

    # Leaving a worker

    def _put_back(self, turn: LiveTurn, outcome: Outcome, now_s: float, *, has_begun: bool = True) -> None:
        """Queue a turn again. Its wait counts from its last progress, so that it is not refused for ever.

        A turn that never began on its worker is not paced: pacing is for storms of turns that did.
        """
        self._unplace(turn, outcome, now_s)
        turn.is_rerouted |= has_begun
        self._enqueue(turn)

    def _unplace(self, turn: LiveTurn, outcome: Outcome, now_s: float) -> None:
        if turn.worker is None:
            return
        self._is_full = False
        self._router.on_ended(turn.request.request_id, outcome, len(turn.produced) - turn.had_tokens, now_s)
        turn.worker.placement.attempt_ids.discard(turn.attempt_id)
        del self._placed[turn.attempt_id]
        self._evicting.pop(turn.attempt_id, None)
        turn.worker = turn.eviction_s = None

    def _end(self, turn: LiveTurn, outcome: Outcome, now_s: float) -> None:
        if turn.is_waiting:
            self.waiting -= 1
        turn.is_over = True
        self._unplace(turn, outcome, now_s)
        del self._turns[turn.request.request_id]
        self._versionless.pop(turn.order, None)
        for queue in (self._queue, self._queue_again, self._queue_demanding):
            if len(queue) > 2 * self.waiting + SWEEP_AT:
                queue[:] = [entry for entry in queue if entry[-1].is_waiting]
                heapq.heapify(queue)

    def _fail(self, turn: LiveTurn, error: RoseError, now_s: float) -> None:
        self.counts.failed += 1
        self._end(turn, "cancelled", now_s)
        turn.sink.fail(error)

    @staticmethod
    def _dismiss_drained(worker: PoolWorker) -> None:
        if worker.placement.is_draining and not worker.placement.attempt_ids:
            target = worker.placement.move_to
            worker.send(Leave("drained") if target is None else Move(target, "it has turns and no free worker"))
