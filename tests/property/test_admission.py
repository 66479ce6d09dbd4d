"""Whatever serving looks like and in whatever order it changes, a grant keeps what its mode promises.

One machine asks three modes about the same device while requests come, are computed, decode and end, steps are
slower or faster than thought, and time passes. Another tells a ledger of lent steps and requests in any order and
compares its verdicts with those worked out from the plain list of intervals.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rose.core.accountant import Breach, SloAccountant
from rose.core.admission import Admission, LendingLimits
from rose.core.facts import Grant, RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.slo import Budgets, credit_s, decode_slack_s, look_ahead
from rose.sim.models import calibrated_model

BUDGETS = Budgets(0.3, 0.08)
SERVING = calibrated_model(lambda features: 0.0005 + 80e-6 * features.new_tokens + 1e-7 * features.kv_read_tokens, 0.03)
ROLLOUT = calibrated_model(lambda features: 0.002 + 30e-6 * features.new_tokens + 8e-6 * features.sequences, 0.03)
SLOWNESS = st.floats(0.7, 1.5)
TICKS = st.integers(1, 300).map(lambda ticks: ticks / 1024)
SLOTS, SLOWDOWN = 3, 1.25


class AdmissionHolds(RuleBasedStateMachine):
    """`waiting` holds (arrival, tokens left), `running` the requests that decode.

    Beside `decode`, which keeps requests' mean pace, there is one that keeps every gap.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 10.0
        self.waiting: list[tuple[float, int]] = []
        self.running: list[RunningRequest] = []
        self.rollout = RolloutView()
        models = copy.deepcopy((SERVING, ROLLOUT))
        limits = LendingLimits(rollout_step_tokens=256, rollout_sequences=48)
        self.idle, self.decode, self.paper = (
            Admission(mode, BUDGETS, *models, limits) for mode in ("idle", "decode", "paper")
        )
        self.every_gap = Admission("decode", replace(BUDGETS, tpot="every_gap"), *models, limits)
        self.all = (self.idle, self.decode, self.paper, self.every_gap)
        for admission in (self.decode, self.every_gap):
            admission.history.bursts.restore(1e9, (), (), self.now_s)

    @rule(tokens=st.integers(1, 3000))
    def arrive(self, tokens: int) -> None:
        self.waiting.append((self.now_s, tokens))
        for admission in self.all:
            admission.history.bursts.learn(admission.history.on_arrival(tokens, self.now_s))

    @precondition(lambda self: self.waiting or self.running)
    @rule(slowness=SLOWNESS)
    def serve(self, slowness: float) -> None:
        """One step: a token of everybody who runs, and of the first prompt what still fits."""
        new = len(self.running)
        chunk = min(self.waiting[0][1], 512 - new) if self.waiting else 0
        features = StepFeatures(
            new + chunk, sum(one.context_tokens for one in self.running) + new + chunk, 0, new + bool(chunk)
        )
        taken_s = SERVING.predict(features) * slowness
        self.idle.serving.observe(features, taken_s)
        self.now_s += taken_s
        for admission in self.all:
            admission.demand.on_step(features, taken_s, self.now_s)
        self.running = [
            replace(one, last_token_s=self.now_s, context_tokens=one.context_tokens + 1, tokens=one.tokens + 1)
            for one in self.running
        ]
        if chunk:
            arrival_s, left = self.waiting.pop(0)
            if left > chunk:
                self.waiting.insert(0, (arrival_s, left - chunk))
            else:
                self.running.append(RunningRequest(self.now_s, left, arrival_s, self.now_s))
                for admission in self.all:
                    admission.history.on_first_token(self.now_s - arrival_s, self.now_s - arrival_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for admission in self.all:
            admission.history.on_departure(0, self.now_s)
            admission.history.lengths.observe(one.tokens)
            if one.tokens > 1:
                gap_s = (one.last_token_s - one.first_token_s) / (one.tokens - 1)
                admission.history.on_answer(one.tokens, gap_s, 0.0, self.now_s - one.arrival_s, len(self.running))

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
        view = ServingView(1, waiting, tuple(self.running))
        grants = [admission.decide(view, self.rollout, self.now_s) for admission in self.all]
        idle = grants[0]
        assert view.is_idle or not idle.is_open(self.now_s)
        for admission, grant in zip(self.all, grants, strict=True):
            self.is_sound(grant)
            if not grant.is_open(self.now_s) or admission is self.paper:
                continue
            expected_s = admission.expected_s(grant, self.rollout) - admission.limits.switch_s
            margin_s = admission.history.first_tokens.margin_s(BUDGETS.ttft_s)
            assert expected_s <= grant.step_s_max <= min(admission.block_s, margin_s)
            if view.is_idle:
                assert (grant.tokens, grant.until_s) == (idle.tokens, idle.until_s)
            else:
                self.is_safe_beside_serving(admission, grant, view)

    def is_sound(self, grant: Grant) -> None:
        """Bounded, explained, never for nobody, and over soon."""
        assert grant.reason
        assert grant.tokens <= 256 and grant.sequences <= 48
        assert grant.tokens <= self.rollout.decoding + self.rollout.prompt_tokens
        assert self.now_s <= grant.until_s <= self.now_s + BUDGETS.ttft_s
        assert not grant.is_open(grant.until_s)

    def is_safe_beside_serving(self, admission: Admission, grant: Grant, view: ServingView) -> None:
        history = admission.history
        assert not view.waiting and admission._latched_until_s <= self.now_s
        assert len(view.running) <= history.bursts.running_max(self.now_s)
        typical = int(history.prompts.typical)
        outlook = look_ahead(view, admission.serving, admission.limits.serving_step_tokens, typical)
        step_s, share_s = outlook.decode_step_s, BUDGETS.slack_share * BUDGETS.tpot_s
        if admission is self.every_gap:
            assert grant.step_s_max <= decode_slack_s(view, share_s, step_s, self.now_s)
        else:
            paces_s = [min(share_s, step_s + margin_s) for margin_s in history.gaps.margins_s(BUDGETS.tpot_s)]
            assert grant.step_s_max <= credit_s(view, paces_s, step_s, self.now_s)


class LedgerAddsUp(RuleBasedStateMachine):
    """Time goes on in pieces that are lent or not; a request is told of up to one piece late, as after a step.

    Prompts have been waiting without a break since `queue_s`; what was lent from then on counts for all of them. All
    times are multiples of 1/1024 s, so that sums are exact.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.accountant = SloAccountant(BUDGETS, slots=SLOTS, slowdown=lambda: SLOWDOWN)
        self.lent: list[tuple[float, float]] = []
        self.here: dict[str, float] = {}  # when each came, in the order in which they were told of
        self.waiting: dict[str, tuple[float, float]] = {}  # since when what was lent counts, and the company's delay
        self.first: dict[str, float] = {}
        self.company: dict[str, float] = {}  # which part of the life of those beside it was not lent, when it came
        self.breaches: Counter[str] = Counter()
        self.told, self.queue_s, self.short_s = 0, 0.0, -1.0

    @rule(seconds=TICKS, is_late=st.booleans())
    def lend(self, seconds: float, is_late: bool) -> None:
        begin_s, self.now_s = self.now_s, self.now_s + seconds
        self.lent.append((begin_s, self.now_s))
        breach = self.accountant.on_lent_step(begin_s, self.now_s, seconds / 2 if is_late else 2 * seconds)
        self.count(breach, "step" if is_late else None)

    @rule(seconds=TICKS)
    def serve(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(ago=TICKS)
    def arrive(self, ago: float) -> None:
        name = f"r{self.told}"
        self.told += 1
        arrival_s = max(0.0, self.now_s - ago)
        if not self.waiting:
            self.queue_s = arrival_s
        from_s = min(arrival_s, self.queue_s)
        oldest_s = next(iter(self.here.values()), from_s)
        self.waiting[name] = (from_s, self.lent_between(oldest_s, from_s))
        self.company[name] = self.own_share(arrival_s)
        self.here[name] = arrival_s
        self.accountant.on_arrival(name, arrival_s)
        if len(self.here) > SLOTS:
            self.short_s = max(self.short_s, arrival_s)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        arrival_s, (from_s, company_s) = self.here[name], self.waiting.pop(name)
        self.first[name] = self.now_s
        taken_s, lent_s = self.now_s - arrival_s, self.lent_between(from_s, self.now_s)
        least_s = taken_s - lent_s
        if self.lent_between(arrival_s, self.now_s) or company_s:
            least_s = least_s / SLOWDOWN - (company_s if self.short_s >= arrival_s else 0.0)
        expected = verdict("ttft", BUDGETS.ttft_s, taken_s, taken_s - lent_s, least_s)
        self.count(self.accountant.on_first_token(name, self.now_s), expected)

    @precondition(lambda self: self.first)
    @rule(tokens=st.integers(1, 9), data=st.data())
    def finish(self, tokens: int, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.first)))
        since_s = self.first.pop(name)
        del self.here[name]
        if len(self.here) >= SLOTS:
            self.short_s = max(self.short_s, self.now_s)
        expected, gaps = None, tokens - 1
        if gaps and self.now_s > since_s:
            taken_s, lent_s = (self.now_s - since_s) / gaps, self.lent_between(since_s, self.now_s) / gaps
            own_s = taken_s - lent_s
            share = min(own_s / taken_s, self.company[name], self.own_share(self.now_s))
            expected = verdict("tpot", BUDGETS.tpot_s, taken_s, own_s, own_s * share)
        self.count(self.accountant.on_finished(name, tokens, self.now_s), expected)

    def own_share(self, at_s: float) -> float:
        lives_s = sum(at_s - arrival_s for arrival_s in self.here.values())
        lent_s = sum(self.lent_between(arrival_s, at_s) for arrival_s in self.here.values())
        return max(0.0, 1 - lent_s / lives_s) if lives_s > 0 else 1.0

    def lent_between(self, since_s: float, until_s: float) -> float:
        """From the intervals themselves."""
        return sum(max(0.0, min(end_s, until_s) - max(begin_s, since_s)) for begin_s, end_s in self.lent)

    def count(self, breach: Breach | None, expected: str | None) -> None:
        assert (breach.objective if breach is not None else None) == expected
        self.breaches.update([expected] if expected else [])

    @invariant()
    def sums_agree(self) -> None:
        assert self.accountant.breaches == self.breaches
        assert self.accountant.open_accounts == len(self.here)
        assert self.accountant.total_lent_s == self.lent_between(0.0, self.now_s)


def verdict(kind: str, limit_s: float, taken_s: float, own_s: float, least_s: float) -> str | None:
    """Of a request that took so long, less what was lent in front of it so long, and alone at least so long."""
    if taken_s <= limit_s or least_s > limit_s:
        return None
    return kind if own_s <= limit_s else "ambiguous"


def test_grants_keep_their_promises_in_any_order_of_events():
    run_state_machine_as_test(AdmissionHolds, settings=settings(stateful_step_count=30))


def test_the_ledger_adds_up_in_any_order_of_events():
    run_state_machine_as_test(LedgerAddsUp, settings=settings(stateful_step_count=30))
