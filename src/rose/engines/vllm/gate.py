"""The gate of a rollout engine: may its next step run, and how large may it be. Knows no vLLM.

Two things must agree. The agent's grant, read from the desk, which expires: a dead agent is a closed gate. And, beside
a serving engine, what `core.passive` decides from its board: a dead engine, a stale board, one that shows nothing or
whose steps are not known yet is a closed gate. Both are read anew before every step. While it is closed nobody polls:
threads that only wait are told by a bell when the agent has written something, or serving has.

When all rollouts have left while it was closed, it is asked for them from then on: it would be called open otherwise,
and they would come back to find it closed.

A new boot of the serving engine is another board: what its steps cost is learnt again. What is known of the rollout
engine's own steps stays. A fresh engine learns from what the board still shows of the past, which saves it the wait.
After its first step, what was shown before it got its terms is left out: those steps may have been slowed by ours, and
it is no longer known which. Without terms nothing is learnt, for nobody sees what runs beside.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from rose.core.admission import Admission, LendingLimits
from rose.core.breaches import Breach
from rose.core.breaker import Breaker
from rose.core.decisions import Grant
from rose.core.dry_run import DryRun
from rose.core.facts import RolloutView, StepFeatures
from rose.core.latency import LatencyModel
from rose.core.passive import FinishedStep, PassiveLending, StepLearner
from rose.core.ration import Ration
from rose.core.slo import Budgets
from rose.engines.vllm.board import BoardReader, Seen
from rose.engines.vllm.desk import Control, Lent, Sheet, Terms
from rose.engines.vllm.mapped import Torn
from rose.engines.vllm.stalled import Stalled
from rose.errors import RoseError

SAFE_MODES = ("idle", "decode")  # what is there to compare with keeps no promise that a breaker could watch over
REASONS_MAX = 32  # that are told apart


class Gate:
    """By the rollout engine's own thread; only what begins with `wait` may be called from another one."""

    def __init__(
        self,
        control: Sheet[Control],
        *,
        step_tokens: int,
        sequences: int,
        now_s: Callable[[], float] = time.monotonic,
        stalled_s: Callable[[], float] | None = None,
    ) -> None:
        self.control = Control()
        self.control_number = 0
        self.last_grant = Grant(0, 0, 0.0, "no agent has asked for anything yet")
        self._sheet, self._now_s = control, now_s
        self._step_tokens, self._sequences = step_tokens, sequences
        self._rollout = StepLearner(LatencyModel())
        self._beside: _Beside | None = None
        self._ration = Ration()
        self._no_board = ""
        self._began: tuple[float, StepFeatures, float, float] | None = None
        self._has_run = False
        self._stalled_s = stalled_s or Stalled().seconds
        self._stalled_before_s = 0.0  # when it was last asked
        self._left = RolloutView()  # what those wanted who may have left a closed gate
        self._closed: tuple[str, float] | None = None
        self._closed_s: dict[str, float] = {}

    # Asking

    def ask(self, rollouts: RolloutView) -> Grant:
        """What may run now; closed with the reason, or open."""
        now_s, self._stalled_before_s = self._now_s(), self._stalled_s()
        self.obey()
        if self._beside is not None:
            self._beside.listen()
        self.last_grant = grant = self._decide(rollouts if _wants(rollouts) else self._left, now_s)
        self._note(grant, rollouts, now_s)
        return grant

    def attend(self) -> None:
        """Now and then while there is nothing to run: learn from what serving does, obey the agent."""
        self.obey()
        if self._beside is not None:
            self._beside.look()
        self.refit_if_due()

    def refit_if_due(self) -> None:
        """While nothing runs: it takes milliseconds."""
        if self._beside is not None:
            self._beside.lending.serving.refit_if_due()
        self._rollout.refit_if_due()

    @property
    def has_word(self) -> bool:
        """Whether the agent has written something that is not obeyed yet."""
        return self._sheet.number != self.control_number

    def is_keen(self, *, has_work: bool) -> bool:
        """Whether every chance counts: rollouts wait for one, or the owner wants to know how many there are."""
        return has_work or self.control.dry_run

    def wait_for_word(self, timeout_s: float) -> bool:
        """Whether the agent has written something new, within this time at most."""
        self._sheet.wait(self.control_number, timeout_s)
        return self.has_word

    def wait_for_news(self, timeout_s: float, *, is_keen: bool) -> bool:
        """Whether serving has shown what may open the gate since it was asked; if not keen, only if it does so now."""
        beside = self._beside
        if beside is None:
            time.sleep(timeout_s)
            return False
        return beside.wait(timeout_s, is_keen=is_keen)

    def _note(self, grant: Grant, rollouts: RolloutView, now_s: float) -> None:
        """For how long they waited, and why."""
        if self._closed is not None:
            why, since_s = self._closed
            known = why if why in self._closed_s or len(self._closed_s) < REASONS_MAX else "other"
            self._closed_s[known] = self._closed_s.get(known, 0.0) + now_s - since_s
        is_waiting = _wants(rollouts) and not grant.is_open(now_s)
        if _wants(rollouts):
            self._left = rollouts if is_waiting else RolloutView()
        self._closed = (grant.reason.partition(":")[0], now_s) if is_waiting else None

    def _decide(self, rollouts: RolloutView, now_s: float) -> Grant:
        control = self.control
        if control.dry_run and self._beside is not None:  # also of an engine for which nothing is lent
            return self._beside.decide(rollouts, self._ration, now_s)
        if control.stopped:
            return Grant(0, 0, now_s, control.stopped)
        own = Grant(control.tokens, control.sequences, control.until_s, "granted by the agent")
        if not own.is_open(now_s):
            return Grant(0, 0, now_s, "the agent's grant is over" if control.until_s else "the agent granted nothing")
        if control.terms is None:
            return own
        if self._beside is None:
            return Grant(0, 0, now_s, self._no_board)
        if self._ration.is_spent(now_s):
            return Grant(
                0, 0, now_s, f"rollouts have had their {self._ration.share:.0%} of the time, the owner's limit"
            )
        return _both(own, self._beside.decide(rollouts, self._ration, now_s))

    # Obeying

    def obey(self) -> None:
        """Take what the agent wants, if it wants something new."""
        if self._sheet.number == self.control_number:
            return
        try:
            number, control = self._sheet.read()
        except Torn:
            return
        assert control is not None
        before, self.control, self.control_number = self.control, control, number
        if control.compute_share != before.compute_share:
            self._ration = Ration(control.compute_share)
        if control.terms != before.terms:
            self._take_terms(control.terms)
        if self._beside is not None:
            self._beside.obey(before, control, self._now_s())

    def _take_terms(self, terms: Terms | None) -> None:
        before, self._beside = self._beside, None
        serving = None
        if before is not None:
            if terms is not None and str(before.board.path) == terms.board:
                serving = before.lending.serving
            before.board.close()
        if terms is None:
            return
        try:
            self._beside = self._beside_of(terms, serving)
        except RoseError as error:
            self._no_board = error.what

    def _beside_of(self, terms: Terms, serving: StepLearner | None) -> _Beside:
        board = BoardReader(Path(terms.board))
        if self._has_run or serving is not None:
            board.skip()
        limits = LendingLimits(
            serving_step_tokens=board.about.step_tokens,
            rollout_step_tokens=self._step_tokens,
            rollout_sequences=self._sequences,
            serving_sequences=board.about.sequences,
        )
        budgets = Budgets(terms.ttft_s, terms.tpot_s, terms.slack_share, terms.answer_s)
        breaker = Breaker() if terms.mode in SAFE_MODES else None
        serving = serving or StepLearner(LatencyModel())
        admission = Admission(terms.mode, budgets, serving.model, self._rollout.model, limits, breaker)
        return _Beside(board, PassiveLending(admission, serving, self._rollout), self._now_s)

    # Steps

    def began(self, features: StepFeatures, began_s: float) -> None:
        self._has_run, model = True, self._rollout.model
        upper_s = model.upper(features)  # infinite while it is not calibrated
        self._began = (began_s, features, upper_s, self._stalled_before_s)

    def ended(self) -> None:
        """The step that began last has ended now."""
        if self._began is None:
            return
        (began_s, features, upper_s, before_s), self._began = self._began, None
        if self._beside is None:
            return
        step = FinishedStep(began_s, self._now_s(), features)
        stalled_s = min(step.seconds, self._stalled_s() - before_s)
        self._ration.spend(step.seconds - stalled_s, step.ended_s)
        self._beside.lent(step, upper_s, stalled_s)

    def lent(self) -> Lent:
        return self._beside.account(self._now_s(), dict(self._closed_s)) if self._beside is not None else Lent()


class _Beside:
    """A serving engine that runs beside, and the account of lending to it."""

    def __init__(self, board: BoardReader, lending: PassiveLending, now_s: Callable[[], float]) -> None:
        self.board, self.lending = board, lending
        self._now_s = now_s
        self._breaches: Counter[str] = Counter()
        self._dry_run: DryRun | None = None
        self._seen: Seen | None = None
        self._rung = (0, 0)  # how often each bell had, when it was last asked

    def obey(self, before: Control, control: Control, now_s: float) -> None:
        if control.dry_run and self._dry_run is None:
            self._dry_run = DryRun(self.lending.admission, now_s)
        elif not control.dry_run:
            self._dry_run = None
        if control.resumes > before.resumes and self.lending.admission.breaker is not None:
            self.lending.admission.breaker.resume()

    def decide(self, rollouts: RolloutView, ration: Ration, now_s: float) -> Grant:
        if not self.look():
            return Grant(0, 0, now_s, "the board is being written too fast to be read")
        if dark := self.board.why_dark(self._seen, now_s):
            return Grant(0, 0, now_s, dark)
        assert self._seen is not None
        if self._dry_run is not None:
            return self._dry_run.decide(self._seen.view, ration, now_s)
        return self.lending.decide(self._seen.view, rollouts, now_s)

    def look(self) -> bool:
        """False if nothing could be read."""
        try:
            self._seen = seen = self.board.look()
        except Torn:
            return False
        if seen is not None:
            self.lending.steps_seen(seen.steps)
            self._count(self.lending.milestones_seen(seen.milestones, seen.lost))
        return True

    def listen(self) -> None:
        """Whatever rings from now on may change what is decided now."""
        self._rung = (self.board.idle.number, self.board.news.number)

    def wait(self, timeout_s: float, *, is_keen: bool) -> bool:
        """By another thread, which may find the board closed."""
        is_any = is_keen and self.lending.admission.mode != "idle"
        bell = self.board.news if is_any else self.board.idle
        with suppress(ValueError):
            rung = self._rung[is_any] if is_keen else bell.number
            bell.wait(rung, timeout_s)
            return bell.number != rung
        return False

    def lent(self, step: FinishedStep, upper_s: float, stalled_s: float) -> None:
        busy_since_s, seen = self.board.busy_since_s, None
        with suppress(Torn):  # what this look would have told comes with the next
            self._seen = seen = self.board.look()
        if seen is not None:
            self.lending.steps_seen(seen.steps, lending_since_s=step.began_s)
        breach = self.lending.lent(step, upper_s, busy_since_s, stalled_s)
        self._count([breach] if breach is not None else [])
        if seen is not None:
            self._count(self.lending.milestones_seen(seen.milestones, seen.lost))

    def account(self, now_s: float, closed_s: dict[str, float]) -> Lent:
        lending, dry_run = self.lending, self._dry_run
        breaker = lending.admission.breaker
        return Lent(
            steps=lending.lent_steps,
            tokens=lending.lent_tokens,
            seconds=lending.ledger.total_lent_s,
            breaches=dict(self._breaches),
            doubtful=lending.ledger.doubtful,
            breaker_trips=breaker.trips if breaker is not None else 0,
            requests=lending.requests,
            attained=lending.attained,
            missing=lending.serving.missing,
            closed_s=closed_s,
            resting=(breaker.why_stopped(now_s) or "") if breaker is not None else "",
            dry_run_tokens=dry_run.tokens if dry_run is not None else 0,
            dry_run_lent_s=dry_run.lent_s if dry_run is not None else 0.0,
            dry_run_s=now_s - dry_run.since_s if dry_run is not None else 0.0,
        )

    def _count(self, breaches: Iterable[Breach]) -> None:
        self._breaches.update(breach.objective for breach in breaches)


def _wants(rollouts: RolloutView) -> bool:
    return rollouts.decoding + rollouts.prompt_tokens > 0


def _both(one: Grant, other: Grant) -> Grant:
    """What both allow, for the reason of the second."""
    until_s = min(one.until_s, other.until_s)
    tokens, sequences = min(one.tokens, other.tokens), min(one.sequences, other.sequences)
    return Grant(tokens, sequences, until_s, other.reason, other.step_s_max)
