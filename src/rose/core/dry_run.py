"""What lending would give, without lending: for an owner who wants to know before allowing it.

Decides as lending would and runs nothing; adds up the tokens that would have been harvested by rollouts that always
have a full batch waiting. Time between two decisions while serving has no work counts as full of steps; beside
decoding a decision counts as one step. That the steps would have changed serving's own pace is not modelled.
"""

from __future__ import annotations

from rose.core.admission import Admission
from rose.core.decisions import Grant
from rose.core.facts import RolloutView, ServingView

CONTEXT_TOKENS = 256  # of a rollout in the middle of its turns


class DryRun:
    """Ask `decide` before every step; read `tokens` and `lent_s` over the time since `since_s`."""

    def __init__(self, admission: Admission, now_s: float) -> None:
        self.admission = admission
        self.since_s = now_s
        self.tokens = 0
        self.lent_s = 0.0
        sequences = min(admission.limits.rollout_sequences, admission.limits.rollout_step_tokens)
        self._pending_rollouts = RolloutView(sequences, 0, CONTEXT_TOKENS)
        self._pending: tuple[int, float, bool, float] | None = None

    def decide(self, view: ServingView, now_s: float) -> Grant:
        """Always closed; what a grant would have given is added when the next one is asked for."""
        self.settle(now_s)
        rollout = self._pending_rollouts
        grant = self.admission.decide(view, rollout, now_s)
        if grant.is_open(now_s):
            self._pending = (grant.tokens, self.admission.expected_s(grant, rollout), view.is_idle, now_s)
        return Grant(0, 0, now_s, f"dry run: {grant.reason}", 0.0)

    def settle(self, now_s: float) -> None:
        """Count what was granted last until now."""
        if self._pending is None:
            return
        tokens, step_s, was_idle, since_s = self._pending
        steps = int((now_s - since_s) / step_s) if was_idle and step_s > 0 else 1
        self.tokens += steps * tokens
        self.lent_s += steps * step_s
        self._pending = (tokens, step_s, True, since_s + steps * step_s) if was_idle else None
