"""Admission, told as stories: what serving looks like, what rollouts want, what is granted and why."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rose.core.admission import START_GRACE_S, Admission, LendingLimits, Mode
from rose.core.breaches import Ledger
from rose.core.breaker import Breaker
from rose.core.decisions import Grant
from rose.core.dry_run import DryRun
from rose.core.facts import RolloutView, RunningRequest, ServingView, StepFeatures, WaitingRequest
from rose.core.latency import LatencyModel
from rose.core.ration import Ration
from rose.core.slo import Budgets, OwnAnswers, OwnGaps
from rose.errors import ConfigError
from rose.sim.models import learnt

NOW_S = 100.0
BUDGETS = Budgets(ttft_s=0.5, tpot_s=0.15)
ROLLOUT = RolloutView(decoding=32, prompt_tokens=400, context_tokens=100)
IDLE = ServingView(1)
LIMITS = LendingLimits(switch_s=0.0)


def serving_cost(features: StepFeatures) -> float:
    return 0.001 + 80e-6 * features.new_tokens


def rollout_cost(features: StepFeatures) -> float:
    return 0.0001 + 30e-6 * features.new_tokens + 8e-6 * features.sequences


SERVING, CHEAP = learnt(serving_cost), learnt(rollout_cost)
DEAR = learnt(lambda features: 0.03 + 30e-6 * features.new_tokens)  # mostly fixed cost


def admission(mode: Mode, rollout: LatencyModel = CHEAP, budgets: Budgets = BUDGETS, **others: object) -> Admission:
    limits = dataclasses.replace(LIMITS, **others)  # type: ignore[arg-type]
    made = Admission(mode, budgets, SERVING, rollout, limits)
    for _ in range(100):
        made.prompts.observe(100)
    return made


def decoding(*ages_s: float, context: int = 100) -> ServingView:
    return ServingView(1, (), tuple(RunningRequest(NOW_S - age_s, context) for age_s in ages_s))


def waiting(*tokens: int, running: int = 0) -> ServingView:
    requests = tuple(WaitingRequest(NOW_S - 0.01, left) for left in tokens)
    return ServingView(1, requests, decoding(*[0.001] * running).running)


@pytest.mark.parametrize(
    "story, mode, view, is_open, reason",
    [
        ("idle lends an idle device", "idle", IDLE, True, "serving has no work"),
        ("idle keeps one that decodes", "idle", decoding(0.001), False, "serving has work"),
        ("idle keeps one with a prompt", "idle", waiting(100), False, "serving has work"),
        ("decode lends an idle device", "decode", IDLE, True, "serving has no work"),
        ("decode lends between tokens", "decode", decoding(0.001, 0.01), True, "slack between decode steps"),
        ("decode keeps off a prompt", "decode", waiting(10), False, "a prompt waits"),
        ("decode keeps off a prompt beside decodes", "decode", waiting(10, running=3), False, "a prompt waits"),
        ("decode waits for a late token", "decode", decoding(0.001, 0.104), False, "no step fits"),
        ("paper lends beside a prompt", "paper", waiting(100), True, "both slacks"),
        ("paper keeps off a full queue", "paper", waiting(*[500] * 12), False, "no slack for a whole step"),
        ("paper keeps off a late token", "paper", decoding(0.148), False, "no slack for a whole step"),
    ],
)
def test_who_may_run(story, mode, view, is_open, reason):
    grant = admission(mode).decide(view, ROLLOUT, NOW_S)
    assert grant.is_open(NOW_S) is is_open, story
    assert reason in grant.reason


@pytest.mark.parametrize("mode", ["idle", "decode", "paper"])
def test_without_rollouts_or_a_profile_the_gate_is_closed(mode):
    assert admission(mode).decide(IDLE, RolloutView(), NOW_S).reason == "rollouts have nothing to run"
    unprofiled = Admission(mode, BUDGETS, SERVING, LatencyModel())
    assert unprofiled.decide(IDLE, ROLLOUT, NOW_S).reason == "step times are not profiled yet"


def test_a_full_step_is_all_decodes_and_prompts_up_to_the_limit():
    grant = admission("idle").decide(IDLE, ROLLOUT, NOW_S)
    assert (grant.tokens, grant.sequences) == (432, 64)
    assert admission("idle", rollout_step_tokens=64).decide(IDLE, ROLLOUT, NOW_S).tokens == 64
    only_decodes = dataclasses.replace(ROLLOUT, prompt_tokens=0)
    assert admission("idle").decide(IDLE, only_decodes, NOW_S).sequences == 32
    crowd = dataclasses.replace(ROLLOUT, decoding=200)
    assert (g := admission("idle").decide(IDLE, crowd, NOW_S)).tokens == g.sequences == 64


@pytest.mark.parametrize("block_share", [0.002, 0.005, 0.01, 0.02, 0.1])
def test_who_arrives_is_blocked_for_a_bounded_time(block_share):
    """However short that is, the step that is granted fits by its upper estimate, and is not needlessly small."""
    lender = admission("idle", block_share=block_share)
    grant = lender.decide(IDLE, ROLLOUT, NOW_S)
    limit_s = block_share * BUDGETS.ttft_s
    assert lender.block_s == limit_s and grant.step_s_max == limit_s - START_GRACE_S
    if grant.tokens:
        assert lender.expected_s(grant, ROLLOUT) <= grant.step_s_max
        assert grant.tokens == 432 or lender.expected_s(grant, ROLLOUT) > 0.3 * grant.step_s_max


def test_the_block_limit_holds_beside_decoding_too():
    lender = admission("decode", budgets=Budgets(0.5, 5.0), block_share=0.01, efficiency_min=0.01)
    grant = lender.decide(decoding(0.001), ROLLOUT, NOW_S)
    assert grant.is_open(NOW_S) and grant.step_s_max <= lender.block_s == 0.005


def test_a_step_that_starts_last_still_ends_in_time():
    lender, view = admission("decode"), decoding(0.05, 0.09)
    grant = lender.decide(view, ROLLOUT, NOW_S)
    assert grant.until_s > NOW_S
    next_step_s = serving_cost(StepFeatures(2, 202, 202, 2))
    deadline_s = NOW_S - 0.09 + 0.7 * BUDGETS.tpot_s
    assert grant.until_s + lender.expected_s(grant, ROLLOUT) + next_step_s <= deadline_s


def test_the_share_is_of_the_budget_not_of_what_is_left():
    shares = (0.5, 0.7, 0.9)
    late = decoding(0.08)
    given = [admission("decode", budgets=Budgets(0.5, 0.15, share)).decide(late, ROLLOUT, NOW_S) for share in shares]
    assert [grant.is_open(NOW_S) for grant in given] == [False, True, True]


def test_what_serving_itself_needs_between_tokens_is_not_lent():
    """Others' prompts come between two tokens too, and nobody knows when: what they took of earlier requests counts."""
    view, found = decoding(0.07), []
    for own_s in (0.0, 0.01, 0.02, 0.05):
        one = admission("decode")
        for number in range(100):
            one.own_gaps.observe(own_s if number % 10 else 0.0)
        found.append(one.decide(view, ROLLOUT, NOW_S))
    widest = found[0].step_s_max
    assert [grant.step_s_max for grant in found[1:3]] == pytest.approx([widest - 0.01, widest - 0.02])
    assert not found[3].is_open(NOW_S) and "no step fits" in found[3].reason
    idle = admission("decode")
    idle.own_gaps.observe(1.0)
    assert idle.decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S), "without requests there is nobody to keep waiting"


def answering(*ages_s: float) -> ServingView:
    """Requests that came so long ago, each with a new token."""
    return ServingView(1, (), tuple(RunningRequest(NOW_S - 0.001, 100, NOW_S - age_s) for age_s in ages_s))


@pytest.mark.parametrize(
    "story, ages_s, own_s, is_open",
    [
        ("young answers are slowed down", (1.0, 41.0), 2.0, True),
        ("one that has taken 0.7 of what users wait is left alone", (1.0, 42.5), 2.0, False),
        ("until users have given up, or are known to be patient", (1.0, 59.9), 2.0, False),
        ("and then no longer", (1.0, 60.5), 2.0, True),
        ("where serving needs long for an answer it has to begin earlier", (31.0,), 30.0, False),
        ("but not before", (29.0,), 30.0, True),
        ("answers that take serving itself longer are not for the impatient", (50.0,), 61.0, True),
    ],
)
def test_an_answer_that_has_taken_long_already_is_left_alone(story, ages_s, own_s, is_open):
    """Every token in time may still be an answer of a minute, on which proxies give up."""
    for mode, expected in (("decode", is_open), ("idle", False)):
        lender = admission(mode, budgets=dataclasses.replace(BUDGETS, answer_s=60.0))
        lender.own_answers.observe(own_s)
        grant = lender.decide(answering(*ages_s), ROLLOUT, NOW_S)
        assert grant.is_open(NOW_S) is expected, story
    assert admission("decode").decide(answering(50.0), ROLLOUT, NOW_S).is_open(NOW_S), "nobody said how long users wait"


def test_a_step_beside_an_answer_ends_before_the_answer_is_too_old():
    lender = admission("decode", budgets=dataclasses.replace(BUDGETS, answer_s=60.0))
    grant = lender.decide(answering(42.0 - 0.02), ROLLOUT, NOW_S)
    assert grant.is_open(NOW_S) and grant.until_s + lender.expected_s(grant, ROLLOUT) <= NOW_S + 0.02
    assert "no step fits" in lender.decide(answering(42.0 - 1e-4), ROLLOUT, NOW_S).reason
    assert "long already" in lender.decide(answering(42.0), ROLLOUT, NOW_S).reason


def test_the_guard_keeps_room_for_the_next_request():
    """100 requests of 100 tokens were seen; then prompts grow until one of them would need most of the budget."""
    lender = admission("decode", latch_share=1.0)
    assert lender.decide(decoding(0.001), ROLLOUT, NOW_S).is_open(NOW_S)
    for _ in range(1000):
        lender.prompts.observe(4400)
    assert "no step fits" in (closed := lender.decide(decoding(0.001), ROLLOUT, NOW_S)).reason
    assert "next request" in closed.reason


def test_requests_do_not_pile_up():
    crowd = decoding(*[0.001] * 33)
    assert "live longer" in admission("decode").decide(crowd, ROLLOUT, NOW_S).reason
    assert admission("decode", running_share=1.0).decide(crowd, ROLLOUT, NOW_S).is_open(NOW_S)


def test_overload_latches_for_seconds_and_idle_goes_on():
    lender = admission("decode")
    lender.decide(waiting(*[500] * 12), ROLLOUT, NOW_S)
    later_s = NOW_S + LIMITS.latch_s - 0.01
    fresh = ServingView(2, (), (RunningRequest(later_s - 0.001, 100),))
    assert "overload" in lender.decide(fresh, ROLLOUT, later_s).reason
    assert lender.decide(IDLE, ROLLOUT, later_s).is_open(later_s)
    after_s = NOW_S + LIMITS.latch_s
    fresh = ServingView(3, (), (RunningRequest(after_s - 0.001, 100),))
    assert lender.decide(fresh, ROLLOUT, after_s).is_open(after_s)


def test_a_long_prompt_is_no_overload_and_one_after_the_other_is():
    lender = admission("decode")
    for _ in range(100):
        lender.prompts.observe(3750)
    assert not lender.decide(decoding(0.001), ROLLOUT, NOW_S).reason.startswith("overload")
    lender.decide(waiting(1000), ROLLOUT, NOW_S)
    assert not lender.is_latched(NOW_S)
    for number in range(4):
        lender.demand.served(StepFeatures(500, 500, 125_000, 1), 0.1, NOW_S + 0.1 * (number + 1))
    lender.decide(waiting(1000), ROLLOUT, NOW_S + 0.4)
    assert lender.is_latched(NOW_S + 0.4)


def test_a_device_that_decodes_all_the_time_is_not_overloaded():
    lender = admission("decode")
    decode = StepFeatures(1, 100, 100, 1)
    seconds = SERVING.predict(decode)
    for number in range(round(2 / seconds)):
        lender.demand.served(decode, seconds, NOW_S + number * seconds)
    now_s = NOW_S + 2
    assert lender.decide(ServingView(2, (), (RunningRequest(now_s - 0.001, 100),)), ROLLOUT, now_s).is_open(now_s)


def test_a_small_step_must_be_nearly_as_efficient_as_a_full_one():
    """30 ms of fixed cost: in 36 ms a part of a step fits, but beside serving it is not worth its time."""
    view = decoding(0.068)
    closed = admission("decode", DEAR).decide(view, ROLLOUT, NOW_S)
    assert "inefficient" in closed.reason and not closed.is_open(NOW_S)
    assert admission("decode", DEAR, efficiency_min=0.01).decide(view, ROLLOUT, NOW_S).is_open(NOW_S)
    assert admission("idle", DEAR, block_share=0.075).decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S), "nobody loses"


def test_a_tripped_breaker_closes_the_gate():
    lender = admission("idle")
    lender.breaker = Breaker()
    lender.breaker.pause("paused by the owner")
    assert lender.decide(IDLE, ROLLOUT, NOW_S) == Grant(0, 0, NOW_S, "paused by the owner", 0.0)
    lender.breaker.resume()
    assert lender.decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S)


def test_a_dry_run_grants_nothing_and_adds_up_what_it_would_have():
    dry, free = DryRun(admission("decode"), NOW_S), Ration()
    sequences = LendingLimits().rollout_sequences
    assert not dry.decide(IDLE, free, NOW_S).is_open(NOW_S)
    assert dry.tokens == 0
    decodes = ServingView(2, (), (RunningRequest(NOW_S + 0.999, 100),))
    dry.settle(NOW_S + 0.5)
    half = dry.tokens
    dry.settle(NOW_S + 1)  # a second without serving work: full of steps
    step_s = rollout_cost(StepFeatures(sequences, sequences * 257, sequences * 257, sequences))
    assert dry.tokens == pytest.approx(sequences / step_s, rel=0.2) and half == pytest.approx(dry.tokens / 2, rel=0.2)
    before = dry.tokens
    dry.decide(decodes, free, NOW_S + 1)
    dry.decide(waiting(10), free, NOW_S + 2)  # one step beside decoding, however long the view lasted
    assert dry.tokens == before + sequences
    dry.decide(IDLE, free, NOW_S + 3)
    assert dry.tokens == before + sequences


def beside_decoding(dry: DryRun, ration: Ration, since_s: float, seconds: int) -> None:
    """Decode steps of a millisecond, with a decision before each."""
    for number in range(1000 * seconds):
        now_s = since_s + number / 1000
        dry.decide(ServingView(1, (), (RunningRequest(now_s - 0.0005, 100),)), ration, now_s)


def test_a_dry_run_counts_no_second_twice():
    """A rollout step longer than serving's was counted at every one of them: seconds per second."""
    dry = DryRun(admission("decode"), NOW_S)
    beside_decoding(dry, Ration(), NOW_S, 1)
    assert 0.8 < dry.lent_s < 1.01
    dry.decide(IDLE, Ration(), NOW_S + 1)
    dry.settle(NOW_S + 2)
    assert 1.8 < dry.lent_s < 2.01


def test_a_dry_run_ends_its_quiet_time_when_a_prompt_comes():
    dry = DryRun(admission("decode"), NOW_S)
    dry.decide(IDLE, Ration(), NOW_S)
    dry.decide(waiting(10), Ration(), NOW_S + 1)
    dry.decide(waiting(10), Ration(), NOW_S + 5)
    assert dry.lent_s == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_a_dry_run_keeps_the_owners_limit_on_time(share):
    ration = Ration(share)
    dry = DryRun(admission("decode"), NOW_S)
    dry.decide(IDLE, ration, NOW_S)
    dry.settle(NOW_S + 30)
    dry.settle(NOW_S + 40)
    assert dry.lent_s == pytest.approx(40 * share, abs=0.3)
    before_s = dry.lent_s
    beside_decoding(dry, ration, NOW_S + 40, 10)
    assert dry.lent_s - before_s == pytest.approx(10 * share, abs=0.3)


def test_alternate_gives_every_second_step_and_all_of_them_when_serving_has_no_work():
    lender, decodes = admission("alternate"), ServingView(2, (), (RunningRequest(NOW_S, 100),))
    grants = [lender.decide(decodes, ROLLOUT, NOW_S).is_open(NOW_S) for _ in range(4)]
    assert grants == [True, False, True, False]
    assert all(lender.decide(IDLE, ROLLOUT, NOW_S).is_open(NOW_S) for _ in range(3))


def test_fcfs_serves_the_side_whose_oldest_request_came_first():
    lender, rollout = admission("fcfs"), dataclasses.replace(ROLLOUT, oldest_arrival_s=NOW_S - 2)
    came = [ServingView(1, (), (RunningRequest(NOW_S, 100, NOW_S - age_s),)) for age_s in (1.0, 3.0)]
    assert [lender.decide(view, rollout, NOW_S).is_open(NOW_S) for view in came] == [True, False]
    assert lender.decide(IDLE, rollout, NOW_S).is_open(NOW_S)


def test_a_ration_holds_lent_time_to_its_share():
    ration, lent_s, now_s = Ration(0.25), 0.0, 0.0
    while now_s < 20.0:
        if ration.is_spent(now_s):
            now_s += 0.001
            continue
        ration.spend(0.01, now_s := now_s + 0.01)
        lent_s += 0.01
    assert lent_s == pytest.approx(5.0, abs=0.3)
    assert Ration(0.0).is_spent(1.0) and not Ration(1.0).is_spent(1.0)


@pytest.mark.parametrize(
    "wrong",
    [{"block_share": 0.0}, {"efficiency_min": 2.0}, {"rollout_sequences": 0}, {"latch_s": -1.0}, {"latch_share": 1.1}],
)
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        LendingLimits(**wrong)
    with pytest.raises(ConfigError, match="choose one of"):
        Admission("always", BUDGETS, SERVING, CHEAP)  # type: ignore[arg-type]


def test_a_device_that_stalled_early_is_not_shut_for_ever():
    """After a few stalls no step fits by its upper estimate, and while none runs nothing better can be learnt."""
    model = learnt(rollout_cost)
    shape = StepFeatures(8, 800, 800, 8)
    for _ in range(4):
        model.observe(shape, 3.0)
    lent = admission("decode", rollout=model)
    view = RolloutView(decoding=8, prompt_tokens=0, context_tokens=100)
    assert lent.decide(ServingView(1), view, 0.0).reason.startswith("no step fits")
    opened_s = next(now_s for now_s in range(120) if lent.decide(ServingView(1), view, float(now_s)).tokens)
    assert opened_s > 5
    for _ in range(50):
        model.observe(shape, 3.0)
    assert not lent.decide(ServingView(1), view, 200.0).tokens, "it is as slow as it was"


# The ledger


def test_a_step_longer_than_its_estimate_is_a_breach():
    ledger = Ledger(BUDGETS)
    assert ledger.lent(1.0, 1.01, upper_s=0.02) is None
    breach = ledger.lent(2.0, 2.06, upper_s=0.02)
    assert breach is not None and breach.objective == "step"
    assert (breach.limit_s, breach.actual_s) == (0.02, pytest.approx(0.06))
    assert ledger.breaches == 1 and ledger.total_lent_s == pytest.approx(0.07)


@pytest.mark.parametrize(
    "story, lent, first_token_s, is_breach",
    [
        ("in time", [(9.9, 10.1)], 10.5, False),
        ("late by what was lent", [(9.9, 10.1)], 10.55, True),
        ("late anyway", [(9.9, 10.1)], 10.7, False),
        ("lent before it came", [(9.0, 10.0)], 10.55, False),
        ("two steps while it waited", [(10.0, 10.1), (10.2, 10.3)], 10.69, True),
    ],
)
def test_a_late_first_token_is_a_breach_if_alone_it_were_not(story, lent, first_token_s, is_breach):
    ledger = Ledger(BUDGETS)
    ledger.lent(*lent[0], upper_s=math.inf)
    ledger.arrived("a", 10.0)
    for step in lent[1:]:
        ledger.lent(*step, upper_s=math.inf)
    assert (ledger.first_token("a", first_token_s) is not None) is is_breach, story
    assert ledger.finished("a", 1, first_token_s) is None
    assert ledger.open_accounts == 0


def test_slow_tokens_are_a_breach_if_alone_they_were_not():
    ledger = Ledger(BUDGETS)
    for name in ("a", "b"):
        ledger.arrived(name, 0.0)
        ledger.first_token(name, 0.1)
    ledger.lent(0.1, 0.6, upper_s=math.inf)
    breach = ledger.finished("a", 6, 0.1 + 5 * 0.2)
    assert breach is not None and breach.objective == "tpot" and breach.lent_s == pytest.approx(0.1)
    assert ledger.finished("b", 6, 0.1 + 5 * 0.3) is None


def test_what_serving_itself_took_for_a_token_and_an_answer_is_all_but_what_was_lent():
    gaps, answers = OwnGaps(), OwnAnswers()
    ledger = Ledger(BUDGETS, gaps, answers)
    ledger.arrived("a", 0.0)
    ledger.lent(0.05, 0.09, upper_s=math.inf)
    ledger.first_token("a", 0.1)
    ledger.lent(0.1, 0.6, upper_s=math.inf)
    ledger.finished("a", 6, 0.1 + 5 * 0.13)
    assert gaps.typical == pytest.approx(0.03), "a gap of 130 ms, of which 100 were lent"
    assert answers.typical == pytest.approx(0.75 - 0.04 - 0.5), "of its 750 ms"
    ledger.arrived("b", 1.0)
    ledger.finished("b", 1, 1.1)
    ledger.arrived("c", 1.0)
    ledger.left("c", 0, 1.1)
    assert gaps.typical == pytest.approx(0.03), "of who has one token or none there is nothing to learn"


def test_a_queue_held_up_by_lending_is_a_breach_for_those_who_join_it():
    ledger = Ledger(BUDGETS)
    ledger.arrived("a", 0.0)
    ledger.lent(0.0, 0.3, upper_s=math.inf)
    ledger.arrived("b", 0.3)
    assert ledger.first_token("a", 0.6) is not None
    breach = ledger.first_token("b", 0.9)
    assert breach is not None and breach.lent_s == pytest.approx(0.3)


def test_more_company_left_by_earlier_lending_is_doubtful():
    ledger = Ledger(BUDGETS)
    ledger.arrived("a", 0.0)
    ledger.first_token("a", 0.1)
    ledger.lent(0.1, 0.3, upper_s=math.inf)
    ledger.arrived("b", 0.3)
    assert ledger.first_token("b", 0.9) is None
    assert (ledger.doubtful, ledger.breaches) == (1, 0)


@pytest.mark.parametrize(
    "story, left_s, lent_s, is_breach",
    [
        ("gave up in time", 0.4, 0.4, False),
        ("gave up late, and was kept waiting by lending", 0.6, 0.2, True),
        ("gave up late, as it would have alone", 0.9, 0.2, False),
    ],
)
def test_who_gives_up_waiting_for_a_first_token_has_lost_it(story, left_s, lent_s, is_breach):
    ledger = Ledger(BUDGETS)
    ledger.arrived("a", 0.0)
    ledger.lent(0.0, lent_s, upper_s=math.inf)
    breach = ledger.left("a", 0, left_s)
    assert (breach is not None and breach.objective == "ttft") is is_breach, story
    assert ledger.open_accounts == 0 and ledger.left("a", 0, 9.0) is None
    ledger.arrived("b", 10.0)
    assert ledger.first_token("b", 10.6) is None, "nobody has been waiting since"


@pytest.mark.parametrize("left_s, is_breach", [(0.1 + 3 * 0.14, False), (0.1 + 3 * 0.2, True), (0.1 + 3 * 0.4, False)])
def test_who_gives_up_between_tokens_has_lost_the_next_one(left_s, is_breach):
    """Three tokens made and the fourth awaited: three gaps, of which lending took 0.1 s each."""
    ledger = Ledger(BUDGETS)
    ledger.arrived("a", 0.0)
    ledger.first_token("a", 0.1)
    ledger.lent(0.1, 0.4, upper_s=math.inf)
    assert (ledger.left("a", 3, left_s) is not None) is is_breach
    assert ledger.open_accounts == 0


def test_a_request_that_is_gone_leaves_no_account():
    ledger = Ledger(BUDGETS)
    ledger.arrived("a", 0.0)
    ledger.gone("a")
    ledger.gone("never came")
    assert ledger.open_accounts == 0
    ledger.lent(0.0, 0.5, upper_s=math.inf)
    ledger.arrived("b", 1.0)
    assert ledger.first_token("b", 1.7) is None, "nobody was waiting while that was lent"
