"""The counters of lending over all rollout engines and terms, for the operator and the gateway."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from rose.vllm.control_segment import LendingAccount, Status

EVICTED = ("evictions", "evicted_tokens")
LENT = ("steps", "tokens", "seconds", "breaker_trips", "requests", "attained")


class LendingCounters:
    """The counters of all engines so far.

    An engine counts from zero, and its account starts anew beside every serving engine. This must see each engine's
    status before the next one's exceeds it.
    """

    def __init__(self) -> None:
        self._gone = self._newest = Status(0)  # counters of what has ended, and the newest

    def total(self, newest: Status) -> Status:
        """Return the levels of `newest` with the counters of all engines and terms so far."""
        before, gone, self._newest = self._newest, self._gone, newest
        is_other = newest.process_id != before.process_id
        if is_other:
            gone = replace(gone, **{name: getattr(gone, name) + getattr(before, name) for name in EVICTED})
        if is_other or any(getattr(newest.lent, name) < getattr(before.lent, name) for name in LENT):
            gone = replace(gone, lent=_sum(gone.lent, before.lent))
        self._gone = gone
        evicted = {name: getattr(newest, name) + getattr(gone, name) for name in EVICTED}
        return replace(newest, lent=_sum(newest.lent, gone.lent), **evicted)


def _sum(one: LendingAccount, other: LendingAccount) -> LendingAccount:
    """Add the counters of both; levels are those of the first."""
    counts = {name: getattr(one, name) + getattr(other, name) for name in LENT}
    return replace(one, breaches=dict(Counter(one.breaches) + Counter(other.breaches)), **counts)
