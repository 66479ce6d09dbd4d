"""What every adapter that lends a device does alike: obey the desired state, decide one step, account for it.

An adapter knows its engine and clock. It asks `step_grant` before each rollout step: a dry run comes first, then stops,
then the compute quota, then admission. Afterwards it reports what was lent and how serving requests ended, so that the
SLO accountant and the circuit breaker learn of both. The embedded step arbiter and the lender beside vLLM build on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rose.core.accountant import Breach, SloAccountant
from rose.core.admission import Admission
from rose.core.facts import Grant, RolloutView, ServingView, StepFeatures
from rose.core.lending_state import DesiredLending, Stop, with_stop

BUCKET_S = 0.25  # dozens of steps; over any second the share holds to within this


class ComputeQuota:
    """The quota of one device: `spend` after every rollout step, `is_spent` before the next one."""

    def __init__(self, share: float = 1.0) -> None:
        assert 0 <= share <= 1
        self.share = share
        self._level_s = BUCKET_S
        self._at_s: float | None = None

    def spend(self, seconds: float, now_s: float) -> None:
        self._fill(now_s)
        self._level_s -= seconds

    def is_spent(self, now_s: float) -> bool:
        """Return whether rollouts have used up their share for now."""
        if self.share >= 1:
            return False
        self._fill(now_s)
        return self._level_s <= 0 or self.share == 0

    def within_s(self, seconds: float, now_s: float) -> float:
        """Return how much of so many seconds from now on back-to-back steps may use."""
        if self.share >= 1 or self.share == 0:
            return self.share * seconds
        self._fill(now_s)
        return max(0.0, min(seconds, self._level_s + self.share * seconds))

    def _fill(self, now_s: float) -> None:
        if self._at_s is not None:
            self._level_s = min(BUCKET_S, self._level_s + self.share * (now_s - self._at_s))
        self._at_s = now_s


CONTEXT_TOKENS = 256  # of a rollout in the middle of its turns


class DryRun:
    """What lending would have given since `since_s`: `tokens` and `lent_s`. Call `decide` before every step."""

    def __init__(self, admission: Admission, now_s: float) -> None:
        self.admission = admission
        self.since_s = now_s
        self.lent_s = 0.0
        sequences = min(admission.limits.rollout_sequences, admission.limits.rollout_step_tokens)
        self._pending_rollouts = RolloutView(sequences, 0, CONTEXT_TOKENS)
        self._tokens = 0.0
        self._kept_until_s = now_s  # by what has been counted
        self._idle: tuple[int, float] | None = None  # tokens and seconds of the steps that follow one another
        self._quota = ComputeQuota()

    @property
    def tokens(self) -> int:
        return int(self._tokens)

    def decide(self, view: ServingView, quota: ComputeQuota, now_s: float) -> Grant:
        """Return a closed grant, and count what it would have been. Only the dry run may use the quota meanwhile."""
        self.settle(now_s)
        self._idle, self._quota = None, quota
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
        self._count(tokens, step_s, self._quota.within_s(now_s - since_s, since_s) / step_s, since_s)
        self._kept_until_s = now_s

    def _lend(self, tokens: int, step_s: float, now_s: float, *, is_idle: bool) -> None:
        assert step_s > 0
        if is_idle:
            self._idle = (tokens, step_s)
            self._kept_until_s = max(self._kept_until_s, now_s)
        elif now_s >= self._kept_until_s and not self._quota.is_spent(now_s):
            self._count(tokens, step_s, 1, now_s)
            self._kept_until_s = now_s + step_s

    def _count(self, tokens: int, step_s: float, steps: float, begin_s: float) -> None:
        self._tokens += steps * tokens
        self.lent_s += steps * step_s
        self._quota.spend(steps * step_s, begin_s)


class LendingController:
    """The desired state of one device, the decision on its next rollout step, and the account of those that ran."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.desired = DesiredLending()
        self.quota = ComputeQuota()
        self.dry_run: DryRun | None = None  # instead of lending
        self.accountant = SloAccountant(
            admission.budgets,
            admission.history,
            slots=admission.limits.serving_sequences,
            slowdown=admission.slowdown,
        )
        self.lent_steps = self.lent_tokens = 0
        self.requests = self.attained = 0  # serving requests that ended; those within both budgets

    # Desired state

    @property
    def stopped(self) -> Stop | None:
        """Why nothing is lent until the operator resumes."""
        return self.desired.stop

    def adopt(self, desired: DesiredLending, now_s: float) -> None:
        before, self.desired = self.desired, desired
        if desired.compute_share != self.quota.share:
            self.quota = ComputeQuota(desired.compute_share)
        if not desired.is_dry_run:
            self.dry_run = None
        elif self.dry_run is None:
            self.dry_run = DryRun(self.admission, now_s)
        if desired.resumes > before.resumes and self.admission.breaker is not None:
            self.admission.breaker.resume()

    def stop(self, stop: Stop) -> None:
        """Lend nothing until the operator resumes. Serving continues."""
        self.desired = with_stop(self.desired, stop)
        if stop.is_final:
            self.dry_run = None

    # One decision

    def step_grant(
        self,
        now_s: float,
        view: Callable[[], ServingView | str],
        admit: Callable[[ServingView], Grant],
        *,
        blocked: str = "",
    ) -> Grant:
        """Return the grant of the next rollout step.

        `blocked` is why the shell itself cannot run one; `view` returns the reason in place of a view it cannot make.
        """
        if self.dry_run is None and (reason := self._why_closed(blocked, now_s)):
            return Grant(0, 0, now_s, reason)
        seen = view()
        if isinstance(seen, str):
            return Grant(0, 0, now_s, seen)
        return admit(seen) if self.dry_run is None else self.dry_run.decide(seen, self.quota, now_s)

    def _why_closed(self, blocked: str, now_s: float) -> str:
        if self.desired.stop is not None:
            return self.desired.stop.text
        if not blocked and self.quota.is_spent(now_s):
            return f"rollouts have had their {self.quota.share:.0%} of the time, the owner's limit"
        return blocked

    def why_resting(self, now_s: float) -> str:
        """Return why the circuit breaker has stopped lending for a while, or an empty text."""
        breaker = self.admission.breaker
        return (breaker.why_stopped(now_s) or "") if breaker is not None else ""

    # Accounting

    def count_step(self, features: StepFeatures, began_s: float, ended_s: float, upper_s: float) -> Breach | None:
        """Account for a rollout step that ran; `upper_s` was its upper estimate."""
        self.lent_steps += 1
        self.lent_tokens += features.new_tokens
        breach = self.accountant.on_lent_step(began_s, ended_s, upper_s)
        if self.admission.breaker is not None:
            self.admission.breaker.on_lent_step(ended_s, is_late=breach is not None)
        return breach

    def count_finished(self, key: str, tokens: int, now_s: float) -> Breach | None:
        """Account for a serving request that ended by itself."""
        self._count_request(self.accountant.is_within_budgets(key, tokens, now_s), now_s)
        return self.accountant.on_finished(key, tokens, now_s)

    def count_left(self, key: str, tokens: int, now_s: float) -> Breach | None:
        """Account for a serving request that was cancelled or evicted, as if its next token had come now."""
        self._count_request(self.accountant.is_within_budgets_if_cancelled(key, tokens, now_s), now_s)
        return self.accountant.on_cancelled(key, tokens, now_s)

    def _count_request(self, is_attained: bool | None, now_s: float) -> None:
        if is_attained is None:
            return
        self.requests += 1
        self.attained += is_attained
        if self.admission.breaker is not None:
            self.admission.breaker.on_finished(now_s)

    def count_lost(self, breaches: Iterable[Breach | None]) -> list[Breach]:
        """Count lost deadlines of serving requests, and return them."""
        lost = [breach for breach in breaches if breach is not None]
        if self.admission.breaker is not None:
            for breach in lost:
                self.admission.breaker.on_deadline_lost(breach.at_s)
        return lost
