"""What lending would give, without lending: for an owner who wants to know before allowing it.

Decides as lending would, within the owner's limit on time, and runs nothing; adds up the tokens that would have been
harvested by rollouts that always have a full batch waiting. Time between two decisions while serving has no work counts
as full of steps. Beside decoding a decision counts as one step, which keeps the device until it would have ended: no
second is counted twice. That the steps would have changed serving's own pace is not modelled.
"""

from __future__ import annotations

from rose.core.admission import Admission
from rose.core.decisions import Grant
from rose.core.facts import RolloutView, ServingView
from rose.core.ration import Ration

CONTEXT_TOKENS = 256  # of a rollout in the middle of its turns


class DryRun:
    """Ask `decide` before every step; read `tokens` and `lent_s` over the time since `since_s`."""

    def __init__(self, admission: Admission, now_s: float) -> None:
        self.admission = admission
        self.since_s = now_s
        self.lent_s = 0.0
        sequences = min(admission.limits.rollout_sequences, admission.limits.rollout_step_tokens)
        self._pending_rollouts = RolloutView(sequences, 0, CONTEXT_TOKENS)
        self._tokens = 0.0
        self._kept_until_s = now_s  # by what has been counted
        self._idle: tuple[int, float] | None = None  # tokens and seconds of the steps that follow one another
        self._ration = Ration()

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def decide(self, view: ServingView, ration: Ration, now_s: float) -> Grant:
        """Always closed. Only a dry run may spend of that ration meanwhile."""
        self.settle(now_s)
        self._idle, self._ration = None, ration
        rollout = self._pending_rollouts
        grant = self.admission.decide(view, rollout, now_s)
        if grant.is_open(now_s):
            self._lend(grant.tokens, self.admission.expected_s(grant, rollout), now_s, is_idle=view.is_idle)
        return Grant(0, 0, now_s, f"dry run: {grant.reason}", 0.0)

    def settle(self, now_s: float) -> None:
        """Count the steps that serving, without work, would have left room for until now."""
        since_s = self._kept_until_s
        if self._idle is None or now_s <= since_s:
            return
        tokens, step_s = self._idle
        self._count(tokens, step_s, self._ration.within_s(now_s - since_s, since_s) / step_s, since_s)
        self._kept_until_s = now_s

    def _lend(self, tokens: int, step_s: float, now_s: float, *, is_idle: bool) -> None:
        assert step_s > 0
        if is_idle:
            self._idle = (tokens, step_s)
            self._kept_until_s = max(self._kept_until_s, now_s)
        elif now_s >= self._kept_until_s and not self._ration.is_spent(now_s):
            self._count(tokens, step_s, 1, now_s)
            self._kept_until_s = now_s + step_s

    def _count(self, tokens: int, step_s: float, steps: float, begin_s: float) -> None:
        self._tokens += steps * tokens
        self.lent_s += steps * step_s
        self._ration.spend(steps * step_s, begin_s)
