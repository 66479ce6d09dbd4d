"""When a turn has stalled, and for how long its worker is left alone then.

A turn shows progress by its tokens. One that shows none for four times as long as was to be expected, and for no less
than half a second, has stalled: it goes on elsewhere with what it has. What is to be expected of a worker is the
slowest it has lately been, apart for the first tokens of a turn, which wait for the prompt, and for those after them.
Of a worker that has shown nothing yet the router's estimate of the whole turn is taken, or a guess that is on the safe
side.

While a worker gets on with other turns, one that waits there is more likely to stand in a queue than to be stuck, and
gets more patience. A worker on which nothing moves is marked: it gets no turns for a while, twice as long each time it
stalls again. A turn that ends there takes a mark away.
"""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_TOKENS_FREE = 64  # what the first tokens take, apart from the prompt, counts as a prompt of this length


@dataclass(frozen=True, slots=True)
class StallRules:
    least_s: float = 0.5
    factor: float = 4.0
    queue_factor: float = 4.0  # more patience while the worker gets on with other turns
    unknown_s: float = 2.5  # expected of a worker that has shown nothing yet
    fade: float = 0.98  # how much of "the slowest lately" is left after another, quicker one
    mark_s: float = 2.0
    mark_longest_s: float = 60.0


@dataclass(slots=True)
class _Seen:
    """Of one worker; None until something was seen."""

    first_s_per_token: float | None = None
    later_s: float | None = None
    moved_s: float = 0.0  # when any of its turns last got on
    marks: int = 0
    marked_until_s: float = 0.0


class Stalls:
    """One per gateway. Tell it what moves; ask it what has stalled."""

    def __init__(self, rules: StallRules | None = None) -> None:
        self._rules = rules or StallRules()
        self._seen: dict[str, _Seen] = {}

    @property
    def least_s(self) -> float:
        """Nobody has stalled who was quiet for less."""
        return self._rules.least_s

    def moved(self, worker: str, quiet_s: float, now_s: float, *, first_of: int | None) -> None:
        """A turn got tokens after `quiet_s`; `first_of` is the length of its prompt if they were its first there."""
        seen = self._of(worker)
        seen.moved_s = now_s
        fade = self._rules.fade
        if first_of is None:
            seen.later_s = max(quiet_s, (seen.later_s or 0.0) * fade)
        else:
            pace = quiet_s / (first_of + PROMPT_TOKENS_FREE)
            seen.first_s_per_token = max(pace, (seen.first_s_per_token or 0.0) * fade)

    def ended(self, worker: str) -> None:
        """A turn came to its end there."""
        seen = self._of(worker)
        seen.marks = max(0, seen.marks - 1)

    def predicted_s(self, worker: str, *, first_of: int | None, whole_s: float = 0.0) -> float:
        """How long until its next tokens; `whole_s` is what the router expects of the whole turn, 0 if nothing."""
        seen = self._of(worker)
        if first_of is None:
            return seen.later_s if seen.later_s is not None else self._rules.unknown_s
        if seen.first_s_per_token is None:
            return whole_s or self._rules.unknown_s
        return seen.first_s_per_token * (first_of + PROMPT_TOKENS_FREE)

    def prompt_tok_s(self, worker: str) -> float | None:
        """How quickly it has lately computed prompts, at the slowest; None if it has shown none."""
        pace = self._of(worker).first_s_per_token
        return 1.0 / pace if pace else None

    def is_stalled(self, worker: str, quiet_s: float, predicted_s: float, now_s: float) -> bool:
        rules = self._rules
        patience_s = max(rules.least_s, rules.factor * predicted_s)
        is_moving = now_s - self._of(worker).moved_s <= patience_s
        return quiet_s > patience_s * (rules.queue_factor if is_moving else 1.0)

    def mark(self, worker: str, now_s: float) -> float:
        """The worker stalled: until when it is to be left alone. Several turns at once are one mark."""
        seen, rules = self._of(worker), self._rules
        if now_s < seen.marked_until_s or now_s - seen.moved_s <= rules.least_s:
            return seen.marked_until_s
        seen.marked_until_s = now_s + min(rules.mark_longest_s, rules.mark_s * 2**seen.marks)
        seen.marks += 1
        return seen.marked_until_s

    def forget(self, worker: str) -> None:
        self._seen.pop(worker, None)

    def _of(self, worker: str) -> _Seen:
        found = self._seen.get(worker)
        if found is None:
            found = self._seen[worker] = _Seen()
        return found
