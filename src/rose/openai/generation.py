"""The choices of one HTTP request on their way through an engine, and the text of each.

A `Choice` is one engine request and its output so far. A `Generation` runs the choices of one HTTP request and yields
deltas as they come, all that one step produced together. The engine is known here by two protocols only, the part of
`EngineClient` that HTTP needs, so a gateway can stand behind the same routes as a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol

import msgspec

from rose.api.requests import EngineFacts, FinishReason, PromptLogprob, Request, TokenEvent, VersionSpan
from rose.engines.token_stream import TokenSink, TokenStream
from rose.errors import Unavailable
from rose.models.stream import TextStream
from rose.openai.http_metrics import HttpMetrics

Alternatives = tuple[tuple[int, float], ...]


class TokenSource(Protocol):
    """A place that runs requests: an engine, a pool of them, or one turn that may be running already."""

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        """Queue requests; their events go to the sink.

        Raise Unavailable while there is no engine, QueueFull when too many requests are queued already.
        """

    def cancel(self, request_ids: Iterable[str]) -> None: ...


class ServedEngine(TokenSource, Protocol):
    """The engine behind an HTTP server."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def trouble(self) -> Unavailable | None:
        """Return why requests cannot be accepted now."""


class StopFinder:
    """A filter of text that ends before the first stop string, or after it with `shows_stop`.

    A stop string may arrive in pieces, so the end of the text that could still become one is held. The shown text does
    not depend on how the text was split into tokens: the stop string that is complete first ends it, and of two that
    are complete together the longer one.
    """

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        self._stops, self._shows_stop = tuple(stops), shows_stop
        self._held = ""
        self.match: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be shown now. It is the last if `match` is set."""
        if not self._stops:
            return text
        text = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start, self.match = min(matches)
            self._held = ""
            return text[: end if self._shows_stop else start]
        shown = len(text) - self._possible_start(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return the held end, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of the text that begins some stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class ChoiceText:
    """The text of one choice, decoded token by token, cut before a stop string, never taken back once shown.

    The first `min_tokens` are not examined, as stop strings do not count before them. With `shows_stop` the text
    includes what ended it: the stop string, or the text of the stop token.
    """

    def __init__(
        self, stream: TextStream, stops: Sequence[str] = (), min_tokens: int = 0, *, shows_stop: bool = False
    ) -> None:
        self._stream = stream
        self._finder = StopFinder(stops, shows_stop=shows_stop)
        self._unexamined = min_tokens
        self.has_stops, self.shows_stop = bool(stops), shows_stop

    @property
    def stopped_by(self) -> str | None:
        return self._finder.match

    def push(self, token_id: int) -> str:
        """Return the text that this token makes showable; empty after a stop string."""
        if self.stopped_by is not None:
            return ""
        text = self._stream.push((token_id,))
        if self._unexamined > 0:
            self._unexamined -= 1
            return text
        return self._finder.push(text) if text else ""

    def finish(self) -> str:
        """Return the rest, when no more tokens come."""
        if self.stopped_by is not None:
            return ""
        shown = self._finder.push(self._stream.finish())
        return shown if self.stopped_by is not None else shown + self._finder.finish()


class ChoiceDelta(msgspec.Struct, frozen=True):
    """The output that one step added to one choice. A struct, since one is made per token.

    It does not refer to its choice, which holds it: a cycle would keep every request in memory until the collector
    runs.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[Alternatives, ...]
    finish_reason: FinishReason | None
    version: str
    start: int  # position of its first token in the output

    @property
    def spans(self) -> list[VersionSpan]:
        end = self.start + len(self.token_ids)
        return [VersionSpan(self.version, self.start, end)] if self.token_ids else []


class Choice:
    """One completion of one prompt. Without `text` the tokens are not decoded (the token route)."""

    def __init__(self, index: int, request: Request, text: ChoiceText | None) -> None:
        self.index = index
        self.request = request
        self.token_ids: list[int] = []
        self.deltas: list[ChoiceDelta] = []
        self.spans: list[VersionSpan] = []
        self.prompt_logprobs: Sequence[PromptLogprob] = ()  # of every token of the prompt but the first
        self.workers: list[str] = []  # of a gateway, in order of first use
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._text = text

    @property
    def has_stop_strings(self) -> bool:
        return self._text is not None and self._text.has_stops

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def push(self, event: TokenEvent) -> ChoiceDelta:
        """Add one event. The engine does not know stop strings: one that is found here ends the choice."""
        self.cached_tokens = event.cached_tokens if event.cached_tokens is not None else self.cached_tokens
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = event.finish_reason
        self.workers += [worker for worker in event.workers if worker not in self.workers]
        count, text = self._decode(event)
        start = len(self.token_ids)
        self.token_ids += event.token_ids[:count]
        if self.spans and self.spans[-1].version == event.version:
            self.spans[-1] = VersionSpan(event.version, self.spans[-1].start, start + count)
        elif count:
            self.spans.append(VersionSpan(event.version, start, start + count))
        delta = ChoiceDelta(
            text,
            event.token_ids[:count],
            event.logprobs[:count],
            event.top_logprobs[:count],
            self.finish_reason,
            event.version,
            start,
        )
        self.deltas.append(delta)
        return delta

    def _decode(self, event: TokenEvent) -> tuple[int, str]:
        """Return how many of the event's tokens count, and their text. The stop token adds none, unless asked for."""
        if self._text is None:
            return len(event.token_ids), ""
        text, count = "", 0
        for count, token_id in enumerate(event.token_ids, start=1):
            if event.finish_reason == "stop" and count == len(event.token_ids):
                # As in vLLM: named if the client asked for it, null if it is the model's own end.
                self.stop_reason = token_id if token_id in self.request.sampling.stop_token_ids else None
                if not self._text.shows_stop:
                    break
            text += self._text.push(token_id)
            if self._text.stopped_by is not None:
                break
        if event.finish_reason is not None:
            text += self._text.finish()
        if self._text.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stopped_by
        return count, text


class Generation:
    """A context manager: entering submits all choices, leaving cancels those that have not ended."""

    def __init__(self, source: TokenSource, metrics: HttpMetrics, choices: Sequence[Choice]) -> None:
        self.choices = choices
        self._source = source
        self._metrics = metrics
        self._open = {choice.request.request_id: choice for choice in choices}
        self._stream = TokenStream()

    def __enter__(self) -> Generation:
        self._source.submit([choice.request for choice in self.choices], self._stream)
        for choice in self.choices:
            request = choice.request
            self._metrics.begin(request.request_id, request.arrival_s, len(request.prompt_ids))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.cancel(self._open)
        self._metrics.abandon(self._open, "error" if isinstance(error, Exception) else "abort")

    async def next(self, *, ends: int = 0) -> list[tuple[Choice, ChoiceDelta]]:
        """Return the deltas since the last call, at least one; none when all choices have ended.

        With `ends` it may wait until that many choices have ended (see TokenStream.take).
        """
        deltas: list[tuple[Choice, ChoiceDelta]] = []
        while self._open and not deltas:
            for event in await self._stream.take(ends=ends):
                choice = self._open.get(event.request_id)
                if choice is None:
                    continue
                delta = choice.push(event)
                deltas.append((choice, delta))
                if delta.finish_reason is not None:
                    del self._open[event.request_id]
                    if event.finish_reason is None:  # a stop string was found here
                        self._source.cancel([event.request_id])
                        self._metrics.abandon([event.request_id], "stop")
        return deltas

    async def finish(self) -> None:
        """Wait for all choices to end. Only stop strings must be looked for in every token."""
        can_wait = not any(choice.has_stop_strings for choice in self.choices)
        while await self.next(ends=len(self._open) if can_wait else 0):
            pass
