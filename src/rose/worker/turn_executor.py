"""The turn executor of an agent: runs turns on its engine, and sends their tokens to the gateway.

Every turn is a sink of the engine. Tokens are gathered by turn. Turns that ended in a step are sent after it, since a
client waits for them. The others are sent every tenth of a second in one message, and less often when many run: the
gateway needs them only if this worker dies, and one message per token would cost it more than the rest of the turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rose.api.faults import fault_of
from rose.api.requests import PromptLogprob
from rose.api.worker_messages import PIECES_MAX, ToGateway, TokensAdded, Turn, TurnRefused, TurnTokens
from rose.bounds import FLOAT_MAX, LOG_PROBABILITY_MAX
from rose.engines.base import EngineClient, FinishReason, Stepped, TokenEvent
from rose.errors import RequestRefused, RoseError, Unavailable
from rose.worker.heartbeats import Rates

GATHER_S = 0.1  # the most work of a turn that dies with its worker; also how often a streaming reader sees news
GATHER_S_MAX = 0.3  # on a worker with many turns; well under the half second after which one may have stalled
LOWEST = -FLOAT_MAX
NO_NUMBER = "a log-probability that is no number; the weights may have diverged"
PIECES_PER_S = 100  # turns of one worker, about, whose tokens are sent in a second


def gather_s(turns: int) -> float:
    """Return how long tokens of running turns are gathered on a worker that has so many."""
    return min(GATHER_S_MAX, max(GATHER_S, turns / PIECES_PER_S))


@dataclass(slots=True)
class _Gathered:
    """What some steps added to one turn under one version."""

    attempt_id: int
    version: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()

    def piece(self) -> TurnTokens:
        return TurnTokens(
            self.attempt_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.version,
            self.finish_reason,
            self.cached_tokens,
            tuple(self.top_logprobs),
            self.prompt_logprobs,
        )


def _are_valid(event: TokenEvent) -> bool:
    """Return whether the gateway can take all log-probabilities of an event. One that is no number spoils a sum."""
    values = [*event.logprobs, *(logprob for logprob, _, _ in event.prompt_logprobs)]
    values += [value for _, _, best in event.prompt_logprobs for _, value in best]
    return not values or (max(values) <= LOG_PROBABILITY_MAX and sum(values) >= LOWEST)


class _TurnSink:
    """The sink of one turn's tokens and errors."""

    is_full = False  # what is gathered is bounded by the time until it is sent

    def __init__(self, executor: TurnExecutor, request_id: str, attempt_id: int) -> None:
        self._executor, self._request_id, self._attempt_id = executor, request_id, attempt_id

    def put(self, event: TokenEvent) -> None:
        self._executor.gather(self._attempt_id, event)

    def fail(self, error: RoseError) -> None:
        self._executor.refuse(self._request_id, error)


class TurnExecutor:
    """The turns of one connection to the gateway."""

    def __init__(
        self, engine: EngineClient, send: Callable[[ToGateway], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.rates = Rates()
        self._engine, self._send, self._now_s = engine, send, now_s
        self._attempts: dict[str, int] = {}  # by request id, of turns that have not ended
        self._gathered: dict[int, _Gathered] = {}  # by attempt id
        self._full: list[_Gathered] = []  # ended, or followed by those of a newer version of the same turn
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False  # a turn, since the last step
        self._unsubscribe = engine.events.steps.subscribe(self._on_step)

    @property
    def running(self) -> int:
        return len(self._attempts)

    def start(self, turn: Turn) -> None:
        request = msgspec.structs.replace(turn.request, arrival_s=self._now_s())
        here = self._engine.facts.version
        try:
            if turn.version is not None and turn.version != here:
                raise Unavailable(f"version `{here}` runs here, not `{turn.version}`")
            self._attempts[request.request_id] = turn.attempt_id
            self._engine.submit([request], _TurnSink(self, request.request_id, turn.attempt_id))
        except RoseError as error:
            self._attempts.pop(request.request_id, None)
            self._send(TurnRefused(turn.attempt_id, fault_of(error)))

    async def evict(self, attempt_id: int) -> None:
        """Have the engine end the turn with "abort", which is sent like any other end."""
        request_id = f"turn-{attempt_id}"
        if request_id in self._attempts:
            try:
                await self._engine.evict(request_id)
            except RoseError as error:
                self.refuse(request_id, error)

    def cancel(self, attempt_id: int) -> None:
        request_id = f"turn-{attempt_id}"
        if self._attempts.pop(request_id, None) is not None:
            self._engine.cancel([request_id])
        self._gathered.pop(attempt_id, None)

    def close(self) -> None:
        """Forget every turn: the connection to the gateway is gone."""
        self._unsubscribe()
        if self._timer is not None:
            self._timer.cancel()
        self._engine.cancel(list(self._attempts))
        self._attempts.clear()

    def flush(self) -> None:
        """Send what has been gathered."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._full += self._gathered.values()
        self._gathered.clear()
        self._send_full()

    def _send_full(self) -> None:
        pieces = [gathered.piece() for gathered in self._full]
        for piece in pieces:
            if piece.prompt_logprobs:  # the first of its turn, up to a megabyte
                self._send(TokensAdded((piece,)))
        pieces = [piece for piece in pieces if not piece.prompt_logprobs]
        for start in range(0, len(pieces), PIECES_MAX):
            self._send(TokensAdded(tuple(pieces[start : start + PIECES_MAX])))
        self._full.clear()

    def _on_step(self, stepped: Stepped) -> None:
        """Send the turns that the step ended; its tokens have been gathered."""
        self.rates.observe(stepped, self._now_s())
        if self._has_ended:
            self._has_ended = False
            self._send_full()
        if self._gathered and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(gather_s(len(self._attempts)), self.flush)

    def gather(self, attempt_id: int, event: TokenEvent) -> None:
        """Keep what a step added to one turn. Only a turn that shows that the weights have diverged is refused."""
        if not _are_valid(event):
            self._engine.cancel([event.request_id])
            self.refuse(event.request_id, RequestRefused(f"version `{event.version}` draws tokens of {NO_NUMBER}"))
            return
        gathered = self._gathered.get(attempt_id)
        if gathered is None or (gathered.version != event.version and event.token_ids):
            if gathered is not None:
                self._full.append(gathered)
            gathered = self._gathered[attempt_id] = _Gathered(attempt_id, event.version)
        gathered.token_ids += event.token_ids
        gathered.logprobs += event.logprobs
        gathered.top_logprobs += event.top_logprobs
        if event.prompt_logprobs:
            gathered.prompt_logprobs = event.prompt_logprobs
        if event.cached_tokens is not None:
            gathered.cached_tokens = event.cached_tokens
        if event.finish_reason is not None:
            gathered.finish_reason = event.finish_reason
            self._full.append(self._gathered.pop(attempt_id))
            del self._attempts[event.request_id]
            self._has_ended = True

    def refuse(self, request_id: str, error: RoseError) -> None:
        """Hand a turn back with the reason; what came before it is still the turn's."""
        attempt_id = self._attempts.pop(request_id, None)
        if attempt_id is not None:
            self.flush()
            self._send(TurnRefused(attempt_id, fault_of(error)))
