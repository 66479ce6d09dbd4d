"""Whatever serving looks like and in whatever order it changes, a grant keeps what its mode promises.

One machine asks all three modes about the same device while requests come, are computed, decode and end, steps are
slower or faster than thought, and time passes. Another tells a ledger of lent steps and requests in any order and
compares its verdicts with those worked out from the plain list of intervals.
"""

from __future__ import annotations

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rose.core.admission import Admission, LendingLimits
from rose.core.breaches import Breach, Ledger
from rose.core.decisions import Grant
from rose.core.facts import RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.slo import Budgets, decode_slack_s, look_ahead
from rose.sim.models import learnt

BUDGETS = Budgets(0.3, 0.08)
SERVING = learnt(lambda features: 0.0005 + 80e-6 * features.new_tokens + 1e-7 * features.kv_read_tokens, 0.03)
ROLLOUT = learnt(lambda features: 0.002 + 30e-6 * features.new_tokens + 8e-6 * features.sequences, 0.03)
SLOWNESS = st.floats(0.7, 1.5)


class AdmissionHolds(RuleBasedStateMachine):
    """`waiting` holds (arrival, tokens left), `running` (newest token, context)."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 10.0
        self.waiting: list[tuple[float, int]] = []
        self.running: list[tuple[float, int]] = []
        self.rollout = RolloutView()
        models = copy.deepcopy((SERVING, ROLLOUT))
        limits = LendingLimits(rollout_step_tokens=256, rollout_sequences=48)
        self.idle, self.decode, self.paper = (
            Admission(mode, BUDGETS, *models, limits) for mode in ("idle", "decode", "paper")
        )

    @rule(tokens=st.integers(1, 3000))
    def arrive(self, tokens: int) -> None:
        self.waiting.append((self.now_s, tokens))
        for admission in (self.idle, self.decode, self.paper):
            admission.prompts.observe(tokens)

    @precondition(lambda self: self.waiting or self.running)
    @rule(slowness=SLOWNESS)
    def serve(self, slowness: float) -> None:
        """One step: a token of everybody who runs, and of the first prompt what still fits."""
        new = len(self.running)
        chunk = min(self.waiting[0][1], 512 - new) if self.waiting else 0
        features = StepFeatures(new + chunk, sum(c for _, c in self.running) + new + chunk, 0, new + bool(chunk))
        taken_s = SERVING.predict(features) * slowness
        self.idle.serving.observe(features, taken_s)
        self.now_s += taken_s
        self.running = [(self.now_s, context + 1) for _, context in self.running]
        if chunk:
            arrival_s, left = self.waiting.pop(0)
            if left > chunk:
                self.waiting.insert(0, (arrival_s, left - chunk))
            else:
                self.running.append((self.now_s, left))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))

    @rule(seconds=st.floats(0.0, 0.2))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(decoding=st.integers(0, 80), prompt=st.integers(0, 2000), context=st.integers(0, 3000), slowness=SLOWNESS)
    def want(self, decoding: int, prompt: int, context: int, slowness: float) -> None:
        self.rollout = RolloutView(decoding, prompt, context)
        features = StepFeatures(decoding + 1, decoding * context, context, decoding + 1)
        self.idle.rollout.observe(features, ROLLOUT.predict(features) * slowness)

    @invariant()
    def grants_keep_their_promises(self) -> None:
        waiting = tuple(WaitingRequest(*request) for request in self.waiting)
        view = ServingView(1, waiting, tuple(RunningRequest(*request) for request in self.running))
        idle, decode, paper = (
            admission.decide(view, self.rollout, self.now_s) for admission in (self.idle, self.decode, self.paper)
        )
        for grant in (idle, decode, paper):
            self.is_sound(grant)
        assert view.is_idle or not idle.is_open(self.now_s)
        for admission, grant in ((self.idle, idle), (self.decode, decode)):
            expected_s = admission.expected_s(grant, self.rollout) - admission.limits.switch_s
            assert not grant.is_open(self.now_s) or expected_s <= grant.step_s_max <= admission.block_s
        if view.is_idle:
            assert (decode.tokens, decode.until_s) == (idle.tokens, idle.until_s)
        elif decode.is_open(self.now_s):
            self.is_safe_beside_serving(decode, view)

    def is_sound(self, grant: Grant) -> None:
        """Bounded, explained, never for nobody, and over soon."""
        assert grant.reason
        assert grant.tokens <= 256 and grant.sequences <= 48
        assert grant.tokens <= self.rollout.decoding + self.rollout.prompt_tokens
        assert self.now_s <= grant.until_s <= self.now_s + BUDGETS.ttft_s
        assert not grant.is_open(grant.until_s)

    def is_safe_beside_serving(self, grant: Grant, view: ServingView) -> None:
        admission, typical = self.decode, self.decode.prompts.typical_tokens
        assert not view.waiting
        assert not admission.is_latched(self.now_s)
        outlook = look_ahead(view, admission.serving, admission.limits.serving_step_tokens, typical)
        share = BUDGETS.slack_share
        assert grant.step_s_max <= decode_slack_s(view, outlook, share * BUDGETS.tpot_s, self.now_s)
        assert grant.step_s_max + outlook.next_ttft_s(typical) <= share * BUDGETS.ttft_s
        assert grant.step_s_max <= admission.block_s


class LedgerAddsUp(RuleBasedStateMachine):
    """Time goes on in pieces that are lent or not; a request is told of up to one piece late, as after a step.

    Prompts have been waiting without a break since `queue_s`; what was lent from then on counts for all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.ledger = Ledger(BUDGETS)
        self.lent: list[tuple[float, float]] = []
        self.arrived: dict[str, tuple[float, float]] = {}
        self.first: dict[str, float] = {}
        self.told = self.breaches = 0
        self.queue_s = 0.0

    @rule(seconds=st.floats(0.001, 0.2), is_late=st.booleans())
    def lend(self, seconds: float, is_late: bool) -> None:
        begin_s, self.now_s = self.now_s, self.now_s + seconds
        self.lent.append((begin_s, self.now_s))
        self.count(self.ledger.lent(begin_s, self.now_s, seconds / 2 if is_late else 2 * seconds), expected=is_late)

    @rule(seconds=st.floats(0.001, 0.2))
    def serve(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(ago=st.floats(0.0, 0.3))
    def arrive(self, ago: float) -> None:
        name = f"r{self.told}"
        self.told += 1
        arrival_s = max(0.0, self.now_s - ago)
        if not self.arrived:
            self.queue_s = arrival_s
        self.arrived[name] = (arrival_s, min(arrival_s, self.queue_s))
        self.ledger.arrived(name, arrival_s)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.arrived)))
        arrival_s, lent_from_s = self.arrived.pop(name)
        self.first[name] = self.now_s
        breach = self.ledger.first_token(name, self.now_s)
        self.count(breach, expected=self.is_lost(arrival_s, lent_from_s, 1, BUDGETS.ttft_s))

    @precondition(lambda self: self.first)
    @rule(tokens=st.integers(1, 9), data=st.data())
    def finish(self, tokens: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.first)))
        since_s = self.first.pop(name)
        breach = self.ledger.finished(name, tokens, self.now_s)
        self.count(breach, expected=tokens > 1 and self.is_lost(since_s, since_s, tokens - 1, BUDGETS.tpot_s))

    def is_lost(self, since_s: float, lent_from_s: float, parts: int, limit_s: float) -> bool | None:
        """From the intervals themselves; None if it is too close to call in floating point."""
        taken_s = self.now_s - since_s
        lent_s = sum(max(0.0, end_s - max(begin_s, lent_from_s)) for begin_s, end_s in self.lent)
        if min(abs(taken_s - parts * limit_s), abs(taken_s - lent_s - parts * limit_s)) < 1e-9:
            return None
        return taken_s - lent_s < parts * limit_s < taken_s

    def count(self, breach: Breach | None, *, expected: bool | None) -> None:
        self.breaches += breach is not None
        assert expected is None or (breach is not None) is expected

    @invariant()
    def sums_agree(self) -> None:
        assert self.ledger.breaches == self.breaches
        assert self.ledger.open_accounts == len(self.arrived) + len(self.first)
        assert abs(self.ledger.total_lent_s - sum(end_s - begin_s for begin_s, end_s in self.lent)) < 1e-9


def test_grants_keep_their_promises_in_any_order_of_events():
    run_state_machine_as_test(AdmissionHolds, settings=settings(stateful_step_count=30))


def test_the_ledger_adds_up_in_any_order_of_events():
    run_state_machine_as_test(LedgerAddsUp, settings=settings(stateful_step_count=30))
