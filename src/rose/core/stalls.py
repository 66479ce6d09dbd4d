"""What makes no progress: stalled turns and blocked devices, and the pace at which their turns are placed elsewhere.

A turn has stalled if it shows no tokens for four times the time expected of its worker, and at least half a second.
While other turns of the worker progress, it is more likely queued than stuck and gets more patience. A worker on which
nothing progresses is marked: it gets no turns for a while, twice as long with each further stall.

A device is *blocked* if rollouts have requested a step for a quarter of a second and admission refused all, whatever
the reason. The next admitted step unblocks it. If every rollout leaves while admission is blocked, nothing probes it
any more, and reporting it as open would only attract them back; so it stays blocked until a step like the last one
would be admitted, and the caller probes for that. A command of the operator or a tripped circuit breaker is no stall.

A re-routed turn brings its whole prompt to a worker without its prefix and delays the turns there. If a burst evicts
turns on all devices, re-routed turns are placed, beyond a few, at the rate at which the remaining workers can compute
their prompts in part of their time. Other turns never wait for this.
"""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_TOKENS_FREE = 64  # the fixed time of the first tokens, as the length of a prompt


@dataclass(frozen=True, slots=True)
class StallRules:
    """Patience with turns, and the penalty of workers."""

    least_s: float = 0.5
    factor: float = 4.0
    queue_factor: float = 4.0  # more patience while other turns of the worker progress
    unknown_s: float = 2.5  # expected time of a worker without observations
    fade: float = 0.98  # decay of the slowest time with every faster one
    mark_s: float = 2.0
    mark_longest_s: float = 60.0


@dataclass(slots=True)
class _WorkerSample:
    """Observations of one worker; None until there are any."""

    first_s_per_token: float | None = None
    later_s: float | None = None
    moved_s: float = 0.0  # when any of its turns last progressed
    marks: int = 0
    marked_until_s: float = 0.0


class Stalls:
    """The stall detector of a gateway: report progress, and ask what has stalled."""

    def __init__(self, rules: StallRules | None = None) -> None:
        self._rules = rules or StallRules()
        self._seen: dict[str, _WorkerSample] = {}

    @property
    def least_s(self) -> float:
        """Return the shortest quiet time that can be a stall."""
        return self._rules.least_s

    def on_progress(self, worker: str, quiet_s: float, now_s: float, *, first_of: int | None) -> None:
        """Record tokens of a turn after `quiet_s`; `first_of` is its prompt length if they are its first there."""
        seen = self._of(worker)
        seen.moved_s = now_s
        fade = self._rules.fade
        if first_of is None:
            seen.later_s = max(quiet_s, (seen.later_s or 0.0) * fade)
        else:
            pace = quiet_s / (first_of + PROMPT_TOKENS_FREE)
            seen.first_s_per_token = max(pace, (seen.first_s_per_token or 0.0) * fade)

    def on_ended(self, worker: str) -> None:
        """Record that a turn ended there, which removes a mark."""
        seen = self._of(worker)
        seen.marks = max(0, seen.marks - 1)

    def predicted_s(self, worker: str, *, first_of: int | None, whole_s: float = 0.0) -> float:
        """Return the expected time to the next tokens; `whole_s` is the router's estimate of the whole turn, or 0."""
        seen = self._of(worker)
        if first_of is None:
            return seen.later_s if seen.later_s is not None else self._rules.unknown_s
        if seen.first_s_per_token is None:
            return whole_s or self._rules.unknown_s
        return seen.first_s_per_token * (first_of + PROMPT_TOKENS_FREE)

    def prompt_tok_s(self, worker: str) -> float | None:
        """Return the slowest recent prefill rate, or None without observations."""
        pace = self._of(worker).first_s_per_token
        return 1.0 / pace if pace else None

    def is_stalled(self, worker: str, quiet_s: float, predicted_s: float, now_s: float) -> bool:
        rules = self._rules
        patience_s = max(rules.least_s, rules.factor * predicted_s)
        is_moving = now_s - self._of(worker).moved_s <= patience_s
        return quiet_s > patience_s * (rules.queue_factor if is_moving else 1.0)

    def mark(self, worker: str, now_s: float) -> float:
        """Mark a worker that stalled, and return until when it gets no turns; stalls at once are one mark."""
        seen, rules = self._of(worker), self._rules
        if now_s < seen.marked_until_s or now_s - seen.moved_s <= rules.least_s:
            return seen.marked_until_s
        seen.marked_until_s = now_s + min(rules.mark_longest_s, rules.mark_s * 2**seen.marks)
        seen.marks += 1
        return seen.marked_until_s

    def forget(self, worker: str) -> None:
        self._seen.pop(worker, None)

    def _of(self, worker: str) -> _WorkerSample:
        seen = self._seen.get(worker)
        if seen is None:
            seen = self._seen[worker] = _WorkerSample()
        return seen


BLOCKED_AFTER_S = 0.25  # some steps of serving; heartbeats once a second could not follow anything faster


class StallDetector:
    """The detector on the device. Report every step that rollouts request, or would request."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # rollouts have requested a step and got none
        self._was_blocked = False

    def on_request(self, now_s: float, *, is_admitted: bool) -> None:
        if is_admitted:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def on_idle(self, now_s: float) -> None:
        """Record that rollouts request no step now."""
        if self.blocked_s(now_s) is None:
            self._since_s = None

    def forget(self) -> None:
        """Forget the stall: nothing is lent at all."""
        self._since_s = None

    def blocked_s(self, now_s: float) -> float | None:
        """Return for how long admission has been blocked, or None."""
        if self._since_s is None or now_s - self._since_s < BLOCKED_AFTER_S:
            return None
        return now_s - self._since_s

    def newly_blocked(self, now_s: float) -> bool:
        """Return whether admission became blocked since the last call.

        The gateway must hear of that at once, or it takes a turn that is quiet for half a second for stalled.
        """
        was_blocked, self._was_blocked = self._was_blocked, self.blocked_s(now_s) is not None
        return self._was_blocked and not was_blocked


@dataclass(slots=True)
class ObservedStall:
    """The stall of a device as the gateway knows it from heartbeats."""

    opened_s: float = 0.0  # when it was last seen to be unblocked
    blocked_since_s: float | None = None

    def on_heartbeat(self, blocked_s: float | None, now_s: float) -> None:
        """Record a heartbeat: blocked for `blocked_s`, or not."""
        if blocked_s is None:
            if self.blocked_since_s is not None:
                self.blocked_since_s, self.opened_s = None, now_s
            return
        since_s = max(now_s - blocked_s, self.opened_s)
        if self.blocked_since_s is None:
            self.blocked_since_s = since_s
        elif since_s - self.blocked_since_s > BLOCKED_AFTER_S:  # more than a heartbeat's delay: it was open
            self.blocked_since_s = self.opened_s = since_s

    def quiet_s(self, since_s: float, now_s: float) -> float:
        """Return the time since `since_s` in which admission was not blocked."""
        until_s = now_s if self.blocked_since_s is None else self.blocked_since_s
        return max(0.0, until_s - max(since_s, self.opened_s))


DUST = 1e-9  # of a permit: rounding error of summed seconds


@dataclass(frozen=True, slots=True)
class PacingRules:
    """Size and rate of the bucket."""

    burst_turns: int = 4  # per remaining worker, placed at once
    prompt_share: float = 0.5  # of the remaining workers' time for prompts of re-routed turns
    turns_per_s_min: float = 2.0  # if their rates are unknown


class Pacer:
    """The pacer of a pool. Report evictions, and call `may_place` just before a re-routed turn is placed."""

    def __init__(self, rules: PacingRules | None = None) -> None:
        self.rules = rules or PacingRules()
        self._burst = float(self.rules.burst_turns)
        self._turns_per_s = self.rules.turns_per_s_min
        self._permits = self._burst
        self._filled_s = 0.0
        self._owed = 0  # evicted turns that have not been placed again

    def set_capacity(self, workers: int, prompts_per_s: float) -> None:
        """Set the remaining workers, and how many such prompts they can compute per second."""
        self._burst = float(self.rules.burst_turns * max(1, workers))
        self._turns_per_s = max(self.rules.turns_per_s_min, self.rules.prompt_share * prompts_per_s)

    def on_evicted(self, count: int, now_s: float) -> None:
        """Record that turns were evicted or lost."""
        self._fill(now_s)
        self._owed += count

    def may_place(self, now_s: float, is_rerouted: bool) -> bool:
        """Return whether a turn may be placed now; for a re-routed turn, True takes a permit."""
        if not is_rerouted:
            return True
        self._fill(now_s)
        if self._permits < 1.0 - DUST:
            return False
        self._permits -= 1.0
        self._owed = max(0, self._owed - 1)
        return True

    def next_s(self) -> float | None:
        """Return when the next re-routed turn may be placed, or None if none waits."""
        if self._permits >= 1.0 - DUST or not self._owed:
            return None
        return self._filled_s + (1.0 - self._permits) / self._turns_per_s

    def _fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._filled_s)  # a clock that jumps back changes nothing
        self._permits = min(self._burst, self._permits + passed_s * self._turns_per_s)
        self._filled_s = now_s
