"""Gates that serving shuts for a while: when a device calls its gate shut, and what is known of that from afar.

The gate of a lent device opens and shuts for single steps, many times a second. Whoever places turns can do nothing
about that, and hears of a device once a second or so; what he wants to know is whether rollouts there stand still. So a
gate is *shut* if rollouts have wanted a step for a quarter of a second and none was let through, whatever the reason: a
prompt that waits, an overload, no step that fits. It is open again with the next one that is.

When all rollouts have left a shut gate nobody asks there any more, and to call it open would only call them back. It
stays shut until such a step as they wanted last would be let through; whoever keeps the watch asks that for them.

A gate that is shut by the owner's word (a pause, a drain, a dry run), by the circuit breaker, or because rollouts' own
front does not read, is not meant here. One that the owner's limit on time shuts is: it opens again by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

SHUT_AFTER_S = 0.25  # some steps of serving; those who hear of it once a second could not follow anything quicker


class GateWatch:
    """On the device. Tell it of every time that rollouts wanted a step, or would have."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # rollouts have wanted a step, and got none
        self._is_told = False

    def asked(self, now_s: float, *, is_let: bool) -> None:
        if is_let:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def left(self, now_s: float) -> None:
        """Nobody wants a step now."""
        if self.shut_s(now_s) is None:
            self._since_s = None

    def forget(self) -> None:
        """Nothing is lent at all: rollouts do not stand still behind this gate."""
        self._since_s = None

    def shut_s(self, now_s: float) -> float | None:
        """For how long it has been shut; None while it is open, or nobody knows better."""
        if self._since_s is None or now_s - self._since_s < SHUT_AFTER_S:
            return None
        return now_s - self._since_s

    def has_shut(self, now_s: float) -> bool:
        """Whether it has become shut since this was last asked.

        Somebody should hear of that at once: he could take a turn for stalled that has been quiet for half a second.
        """
        was_told, self._is_told = self._is_told, self.shut_s(now_s) is not None
        return self._is_told and not was_told


@dataclass(slots=True)
class GateSeen:
    """From afar, by what a device tells now and then."""

    opened_s: float = 0.0  # when it was last seen to be open again
    gated_since_s: float | None = None

    def told(self, shut_s: float | None, now_s: float) -> None:
        """It has been shut for so long, or is open."""
        if shut_s is None:
            if self.gated_since_s is not None:
                self.gated_since_s, self.opened_s = None, now_s
            return
        since_s = max(now_s - shut_s, self.opened_s)
        if self.gated_since_s is None:
            self.gated_since_s = since_s
        elif since_s - self.gated_since_s > SHUT_AFTER_S:  # not the way here: it was open in between
            self.gated_since_s = self.opened_s = since_s

    def quiet_s(self, since_s: float, now_s: float) -> float:
        """How much of the time since then the gate had nothing to do with."""
        until_s = now_s if self.gated_since_s is None else self.gated_since_s
        return max(0.0, until_s - max(since_s, self.opened_s))
