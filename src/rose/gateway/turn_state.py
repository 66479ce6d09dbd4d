"""One turn under way as the scheduler tracks it, and counters of what became of all turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from rose.api.requests import SPANS_MAX, VersionSpan
from rose.api.worker_messages import Alternatives, PromptLogprobs, TurnTokens
from rose.bounds import ITEMS_MAX, TOKENS_MAX, Count, LogProbability, Name, TokenId
from rose.core.routing_rules import TurnView
from rose.core.versions import VersionDemand
from rose.engines.base import FinishReason, Partial, Request, TokenEvent
from rose.errors import RoseError, Unavailable
from rose.gateway.pool import PoolWorker


class PartialOutput(msgspec.Struct, array_like=True):
    """The output of one turn. The first five fields are the format of the ledger; new ones go behind them."""

    token_ids: Annotated[list[TokenId], Meta(max_length=TOKENS_MAX)] = []
    logprobs: Annotated[list[LogProbability], Meta(max_length=TOKENS_MAX)] = []
    spans: Annotated[list[VersionSpan], Meta(max_length=SPANS_MAX)] = []
    top_logprobs: Annotated[list[Alternatives], Meta(max_length=TOKENS_MAX)] = []  # empty, or one entry per token
    workers: Annotated[list[Name], Meta(max_length=ITEMS_MAX)] = []  # in the order in which they took part
    cached_tokens: Count | None = None
    prompt_logprobs: PromptLogprobs = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: str,
        top: Sequence[Alternatives] = (),
        worker: str = "",
    ) -> None:
        count, start, spans = len(token_ids), len(self.token_ids), self.spans
        assert count == len(logprobs), f"{count} tokens with {len(logprobs)} log-probabilities"
        if not count:
            return
        self.token_ids += token_ids
        self.logprobs += logprobs
        if top:
            self.top_logprobs += top
        if worker and worker not in self.workers:
            self.workers.append(worker)
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, start + count)
        else:
            spans.append(VersionSpan(version, start, start + count))

    def cut(self, tokens: int) -> None:
        """Keep only the first tokens."""
        del self.token_ids[tokens:], self.logprobs[tokens:], self.top_logprobs[tokens:]
        kept = [span for span in self.spans if span.start < tokens]
        self.spans = [VersionSpan(span.version, span.start, min(span.end, tokens)) for span in kept]

    def partial(self) -> Partial:
        return Partial(tuple(self.token_ids), tuple(self.logprobs), tuple(self.spans)) if self.token_ids else Partial()

    def events(self, request_id: str, version: str, finish_reason: FinishReason | None) -> list[TokenEvent]:
        """Return the same tokens as events for a new reader; the last one carries the finish reason."""
        events = []
        for span in self.spans:
            part = slice(span.start, span.end)
            events.append(
                TokenEvent(
                    request_id,
                    tuple(self.token_ids[part]),
                    tuple(self.logprobs[part]),
                    span.version,
                    finish_reason if span is self.spans[-1] else None,
                    tuple(self.top_logprobs[part]),
                    self.cached_tokens if span.start == 0 else None,
                    tuple(self.workers) if span.start == 0 else (),
                    self.prompt_logprobs if span.start == 0 else (),
                )
            )
        if not events and finish_reason is not None:
            events.append(TokenEvent(request_id, (), (), version, finish_reason))
        return events


class Sink(Protocol):
    """The reader of one turn: it gets events, the last with a finish reason, or an error instead of the rest."""

    def put(self, event: TokenEvent) -> None: ...

    def fail(self, error: RoseError) -> None: ...


@dataclass(slots=True, eq=False)
class LiveTurn:
    """One turn that has not ended. Without a worker it waits, since `waiting_since_s`."""

    request: Request
    affinity: str
    group: str | None
    sink: Sink
    produced: PartialOutput
    order: int
    waiting_since_s: float
    worker: PoolWorker | None = None
    attempt_id: int = 0
    is_over: bool = False
    is_rerouted: bool = False
    progress_s: float = 0.0  # this and the following belong to its present placement
    is_first: bool = True  # it has produced no token there
    had_tokens: int = 0
    predicted_s: float = 0.0
    version: str = ""  # that the worker ran
    oldest: int | None = None  # number of the oldest version that it could be placed on
    eviction_s: float | None = None  # when the worker was asked to hand it back

    @property
    def is_waiting(self) -> bool:
        return not self.is_over and self.worker is None

    @property
    def first_of(self) -> int | None:
        """The tokens that its worker must compute before the first new one; None after that one."""
        return len(self.request.prompt_ids) + self.had_tokens if self.is_first else None

    def view(self, demand: VersionDemand | None = None) -> TurnView:
        """Return the turn as the router sees it: what it has produced is computed again as part of the prompt."""
        produced = len(self.produced)
        return TurnView(
            trajectory=self.affinity,
            group=self.group,
            prompt_tokens=len(self.request.prompt_ids) + produced,
            max_tokens=max(1, self.request.sampling.max_tokens - produced),
            demand=demand,
        )


@dataclass(slots=True)
class Counts:
    """Counters that only grow: begun = ended + failed + cancelled + turns under way."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    placed: int = 0
    evicted: int = 0  # handed back by a worker
    refused: int = 0
    lost: int = 0  # with the worker that ran them
    stalled: int = 0  # reclaimed from a worker that did not advance them
    off_version: int = 0  # reclaimed from a worker whose weights were outside the bound
    late: int = 0  # pieces of turns that had been reclaimed from the worker
    tokens: int = 0


def check_piece(turn: LiveTurn, piece: TurnTokens, vocabulary: int) -> None:
    """Raise Unavailable for tokens that no engine could have sampled; their worker is then removed."""
    count, most = len(piece.token_ids), turn.request.sampling.max_tokens
    total, wrong = len(turn.produced.token_ids) + count, ""
    if len(piece.logprobs) != count or (piece.top_logprobs and len(piece.top_logprobs) != count):
        wrong = f"{count} tokens with {len(piece.logprobs)} log-probabilities"
    elif count and max(piece.token_ids) >= vocabulary:
        wrong = f"token id {max(piece.token_ids)} of a vocabulary of {vocabulary}"
    elif piece.top_logprobs and any(token_id >= vocabulary for entry in piece.top_logprobs for token_id, _ in entry):
        wrong = f"an alternative outside the vocabulary of {vocabulary}"
    elif total > most:
        wrong = f"{total} tokens of a turn that asked for {most}"
    elif piece.prompt_logprobs and not _fits_prompt(piece.prompt_logprobs, turn, vocabulary):
        wrong = f"{len(piece.prompt_logprobs)} log-probabilities of a prompt that did not ask for them"
    elif piece.finish_reason in ("stop", "length") and not total:
        wrong = "the end of a turn without a token"
    if wrong:
        raise Unavailable(f"a worker sent {wrong}")


def _fits_prompt(scores: PromptLogprobs, turn: LiveTurn, vocabulary: int) -> bool:
    """Return whether these can be the log-probabilities that the turn asked for and does not have yet."""
    top = turn.request.sampling.prompt_logprobs
    if top is None or turn.produced or len(scores) != len(turn.request.prompt_ids) - 1:
        return False
    bests = [best for _, _, best in scores]
    is_short = max(map(len, bests), default=0) <= top
    return is_short and all(token_id < vocabulary for best in bests for token_id, _ in best)
