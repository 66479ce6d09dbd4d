"""What one turn has produced so far, wherever it ran: tokens, log-probabilities, which weights drew which, and who.

It only grows, piece by piece, and at any moment it is what another worker needs to go on (`partial`) and what a reader
who comes late, or asks again, is told (`events`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.engines.base import FinishReason, Partial, Span, TokenEvent

Alternatives = tuple[tuple[int, float], ...]


class Produced:
    __slots__ = ("cached_tokens", "logprobs", "spans", "token_ids", "top_logprobs", "workers")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[Alternatives] = []  # empty, or one entry per token
        self.spans: list[Span] = []
        self.cached_tokens: int | None = None
        self.workers: list[str] = []  # in the order they came in

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
        assert len(token_ids) == len(logprobs), f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities"
        start = len(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.top_logprobs += top
        if worker and token_ids and worker not in self.workers:
            self.workers.append(worker)
        end = len(self.token_ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = Span(version, self.spans[-1].start, end)
        elif end > start:
            self.spans.append(Span(version, start, end))

    def cut(self, tokens: int) -> None:
        """Keep only the first tokens."""
        del self.token_ids[tokens:], self.logprobs[tokens:], self.top_logprobs[tokens:]
        kept = [span for span in self.spans if span.start < tokens]
        self.spans = [Span(span.version, span.start, min(span.end, tokens)) for span in kept]

    def partial(self) -> Partial:
        if not self.token_ids:
            return Partial()
        return Partial(tuple(self.token_ids), tuple(self.logprobs), tuple(self.spans))

    def events(self, request_id: str, version: str, finish_reason: FinishReason | None) -> list[TokenEvent]:
        """The same tokens as events for a new reader; the last one carries the finish reason."""
        found = []
        for span in self.spans:
            part = slice(span.start, span.end)
            is_last = span is self.spans[-1]
            found.append(
                TokenEvent(
                    request_id,
                    tuple(self.token_ids[part]),
                    tuple(self.logprobs[part]),
                    span.version,
                    finish_reason if is_last else None,
                    tuple(self.top_logprobs[part]),
                    self.cached_tokens if span.start == 0 else None,
                    tuple(self.workers) if span.start == 0 else (),
                )
            )
        if not found and finish_reason is not None:
            found.append(TokenEvent(request_id, (), (), version, finish_reason))
        return found
