"""From tokens to the text a client sees: decoded as it comes, cut before a stop string, never taken back.

A stop string may arrive in pieces, so the end of the text that could still become one is held. What is shown does not
depend on how the text was cut into tokens: the stop string that is complete first ends it, the longer one of two that
are complete together.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.models.stream import TextStream


class StopFinder:
    """Text in, text that may be shown out; after a stop string was found, nothing more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What can be shown now. When `found` is set it is the last."""
        if not self._stops:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, self.found = match
            self._held = ""
            return text[:start]
        kept = self._possible_start(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """The end that turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of the text that begins some stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class ChoiceText:
    """The text of one choice. `min_tokens` come through unexamined, as stop strings do not count before them."""

    def __init__(self, stream: TextStream, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._stream = stream
        self._finder = StopFinder(stops)
        self._unexamined = min_tokens
        self.has_stops = bool(stops)

    @property
    def stopped_by(self) -> str | None:
        return self._finder.found

    def push(self, token_id: int) -> str:
        """The text this token lets us show; empty once a stop string was found."""
        if self._finder.found is not None:
            return ""
        text = self._stream.push((token_id,))
        if self._unexamined > 0:
            self._unexamined -= 1
            return text
        return self._finder.push(text) if text else ""

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self._finder.found is not None:
            return ""
        shown = self._finder.push(self._stream.finish())
        return shown if self._finder.found is not None else shown + self._finder.finish()
