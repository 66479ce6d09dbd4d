"""The choices of one HTTP request on their way through the engine.

A `Choice` is one request of the engine and what has come of it; a `Generation` runs the choices of one HTTP request and
hands out pieces as they come, all that one step produced together. Leaving a generation early, for whatever reason,
cancels in the engine what has not ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from rose.coserve.mailbox import Mailbox
from rose.engines.base import Request, TokenEvent
from rose.front.handle import EngineHandle
from rose.front.metrics import FrontMetrics
from rose.front.text import ChoiceText

Alternatives = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class WeightSpan:
    """Output tokens [start, end) were sampled under this version of the weights."""

    version: str
    start: int
    end: int


class Piece(msgspec.Struct, frozen=True):
    """What one step added to one choice. A struct, since one is made per token.

    It does not refer to its choice, which holds it: a cycle would keep every request in memory until the collector
    runs.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[Alternatives, ...]
    finish_reason: str | None
    version: str
    start: int  # where its tokens are in the output


class Choice:
    """One completion of one prompt. Without `text` the tokens are not decoded (the token route)."""

    def __init__(self, index: int, request: Request, text: ChoiceText | None) -> None:
        self.index = index
        self.request = request
        self.token_ids: list[int] = []
        self.pieces: list[Piece] = []
        self.spans: list[WeightSpan] = []
        self.workers: list[str] = []  # of a gateway, in the order they came in
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._text = text

    @property
    def has_stop_strings(self) -> bool:
        return self._text is not None and self._text.has_stops

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def push(self, event: TokenEvent) -> Piece:
        """Take in one event. A stop string ends the choice by itself; the engine does not know of it."""
        self.cached_tokens = event.cached_tokens if event.cached_tokens is not None else self.cached_tokens
        self.finish_reason = event.finish_reason
        self.workers += [worker for worker in event.workers if worker not in self.workers]
        count, text = self._decode(event)
        start = len(self.token_ids)
        self._extend_spans(event.version, start, start + count)
        self.token_ids += event.token_ids[:count]
        piece = Piece(
            text,
            event.token_ids[:count],
            event.logprobs[:count],
            event.top_logprobs[:count],
            self.finish_reason,
            event.version,
            start,
        )
        self.pieces.append(piece)
        return piece

    def _decode(self, event: TokenEvent) -> tuple[int, str]:
        """How many of the event's tokens count, and their text. The token that stopped the engine is not shown."""
        if self._text is None:
            return len(event.token_ids), ""
        hidden_last = event.finish_reason == "stop"
        text = ""
        for position, token_id in enumerate(event.token_ids):
            if hidden_last and position == len(event.token_ids) - 1:
                self._note_stop_token(token_id)
                break
            text += self._text.push(token_id)
            if self._text.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
                return position + 1, text
        if event.finish_reason is not None:
            text += self._text.finish()
        if self._text.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
        return len(event.token_ids), text

    def _note_stop_token(self, token_id: int) -> None:
        """As vLLM has it: named if the caller asked for it, null if it is the model's own end."""
        if token_id in self.request.sampling.stop_token_ids:
            self.stop_reason = token_id

    def _extend_spans(self, version: str, start: int, end: int) -> None:
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = end
        elif end > start:
            self.spans.append(WeightSpan(version, start, end))


class Generation:
    """A context manager: entering submits all choices, leaving cancels those that have not ended."""

    def __init__(self, engine: EngineHandle, metrics: FrontMetrics, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self._engine = engine
        self._metrics = metrics
        self._open = {choice.request.request_id: choice for choice in choices}
        self._mailbox: Mailbox

    def __enter__(self) -> Generation:
        self._mailbox = self._engine.submit([choice.request for choice in self.choices])
        for choice in self.choices:
            request = choice.request
            self._metrics.begin(request.request_id, request.arrival_s, len(request.prompt_ids))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.cancel(self._open)
        self._metrics.abandon(self._open, "error" if isinstance(error, Exception) else "abort")

    async def next(self, *, ends: int = 0) -> list[tuple[Choice, Piece]]:
        """What came since the last call, at least one piece; empty when all choices have ended.

        With `ends` it may wait until that many choices have ended (see Mailbox.take).
        """
        pieces: list[tuple[Choice, Piece]] = []
        while self._open and not pieces:
            for event in await self._mailbox.take(ends=ends):
                choice = self._open.get(event.request_id)
                if choice is not None:
                    pieces.append((choice, self._push(choice, event)))
        return pieces

    async def finish(self) -> None:
        """Wait for all choices to end. Only stop strings must be looked for in every token."""
        patient = not any(choice.has_stop_strings for choice in self.choices)
        while await self.next(ends=len(self._open) if patient else 0):
            pass

    def _push(self, choice: Choice, event: TokenEvent) -> Piece:
        piece = choice.push(event)
        if piece.finish_reason is not None:
            request_id = choice.request.request_id
            del self._open[request_id]
            if event.finish_reason is None:
                self._engine.cancel([request_id])
                self._metrics.abandon([request_id], "stop")
        return piece
