"""The latency model: what it learns from a profile, what it forgives, what it follows, and that its promise holds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from rose.core.facts import StepFeatures
from rose.core.latency import KEPT_PER_REGION, REGIONS_MAX, LatencyModel, profile_plan
from rose.engines.base import Budget, Request, Sampling
from rose.engines.profiles import load_profile
from rose.engines.simulated import SimulatedEngine

CONSTANTS = (1.2e-4, 8e-5, 1.5e-7, 8e-8, 9e-6)
Cost = Callable[[StepFeatures], float]


def shape(new_tokens: int, context: int, requests: int) -> StepFeatures:
    """So many new tokens for each of so many requests behind a context."""
    by_context = new_tokens * context + new_tokens * (new_tokens + 1) // 2
    return StepFeatures(new_tokens * requests, (new_tokens + context) * requests, by_context * requests, requests)


def mixed(chance: random.Random) -> StepFeatures:
    if chance.random() < 0.6:
        return shape(1, chance.randint(16, 2000), chance.choice((1, 2, 5, 8, 13, 32, 64)))
    requests = chance.choice((1, 1, 2, 8))
    return shape(chance.choice((16, 50, 128, 512)) // requests, chance.choice((0, 0, 300, 1500)), requests)


def by_sum(step: StepFeatures) -> float:
    return LatencyModel(CONSTANTS).predict(step)


def by_roofline(step: StepFeatures) -> float:
    return load_profile("h800-qwen2.5-7b").step_s(step)


def by_tiles(step: StepFeatures) -> float:
    """Rows are computed six at a time, and more than 200 no longer fit a cache."""
    rows = -(-step.new_tokens // 6) * 6
    return by_sum(StepFeatures(rows, step.kv_read_tokens, step.new_by_context, step.sequences)) * (
        1.1 if rows > 200 else 1
    )


def profiled(cost: Cost, noise: float = 0.0, *, stalls: float = 0.0, seed: int = 0) -> LatencyModel:
    """A model that has seen the plan's shapes, each a few times."""
    chance, steps = random.Random(seed), []
    for _ in range(3):
        for planned in profile_plan(512, 64, 4096):
            chunk = min(planned.context_tokens, max(1, planned.new_tokens // planned.requests))
            shapes = [shape(chunk, 0, planned.requests), shape(chunk, planned.context_tokens - chunk, planned.requests)]
            shapes += [shape(1, planned.context_tokens, planned.requests)] * planned.decode_steps
            steps += [(step, cost(step) * chance.lognormvariate(0, noise)) for step in shapes]
    steps = [(step, taken_s + (0.05 if chance.random() < stalls else 0.0)) for step, taken_s in steps]
    model = LatencyModel()
    assert model.fit(steps)
    return model


def worst_error(model: LatencyModel, cost: Cost) -> float:
    chance = random.Random(9)
    return max(abs(model.predict(step) / cost(step) - 1) for step in (mixed(chance) for _ in range(500)))


# What it learns


def test_a_model_without_a_profile_promises_nothing() -> None:
    model = LatencyModel()
    assert not model.is_calibrated
    assert model.predict(shape(1, 10, 1)) == model.upper(shape(1, 10, 1)) == math.inf
    assert not model.fit([(shape(1, 10, 1), 0.001)] * 3), "three steps are no profile"
    assert not model.is_calibrated and not LatencyModel().refit()


def test_a_profile_without_noise_is_learnt_exactly() -> None:
    model = profiled(by_sum)
    assert model.constants == pytest.approx(CONSTANTS, rel=0.02)
    assert worst_error(model, by_sum) < 0.01


def test_steps_that_were_stalled_do_not_spoil_a_profile() -> None:
    assert worst_error(profiled(by_sum, 0.02, stalls=0.05), by_sum) < 0.1


def test_no_constant_is_ever_negative() -> None:
    chance = random.Random(0)
    for _ in range(50):
        model = LatencyModel()
        assert model.fit([(mixed(chance), chance.lognormvariate(-7, 2)) for _ in range(40)])
        assert min(model.constants) >= 0 and max(model.constants) > 0


def test_a_feature_that_never_occurs_costs_nothing_and_breaks_nothing() -> None:
    model = LatencyModel()
    assert model.fit([(StepFeatures(new, 0, 0, 1), 0.001 * new) for new in range(1, 30)])
    assert model.predict(StepFeatures(10, 0, 0, 1)) == pytest.approx(0.01, rel=0.02)


def test_what_a_sum_cannot_say_is_learnt_by_region() -> None:
    """One row costs as much as six; the sum alone is off by half there."""
    model = profiled(by_tiles)
    for rows in (1, 2, 3, 6, 8, 12):
        assert model.predict(shape(1, 200, rows)) == pytest.approx(by_tiles(shape(1, 200, rows)), rel=0.08)


def test_a_refit_learns_what_the_profile_did_not_show() -> None:
    """Shapes of a kind that cost three times what the fit thought, and others of that kind that were never seen."""

    def cost(step: StepFeatures) -> float:
        return by_sum(step) + 4e-7 * step.kv_read_tokens

    model, chance = LatencyModel(CONSTANTS), random.Random(0)
    for _ in range(2048):
        step = mixed(chance)
        model.observe(step, cost(step))
    assert model.is_refit_due and model.refit() and not model.is_refit_due
    assert model.predict(shape(1, 3500, 64)) == pytest.approx(cost(shape(1, 3500, 64)), rel=0.1)


def test_an_empty_step_costs_nothing_and_teaches_nothing() -> None:
    model = profiled(by_sum)
    seen = model.observed
    for step, seconds in ((StepFeatures(), 1.0), (shape(1, 10, 1), 0.0), (shape(1, 10, 1), math.inf)):
        model.observe(step, seconds)
    assert model.observed == seen
    assert model.predict(StepFeatures()) == model.upper(StepFeatures()) == 0.0


# What it forgives and what it follows


def test_one_step_stopped_for_50_ms_changes_nothing_to_speak_of() -> None:
    model, step = profiled(by_sum, 0.02), shape(1, 200, 8)
    predicted_s, upper_s = model.predict(step), model.upper(step)
    model.observe(step, by_sum(step) + 0.05)
    assert model.predict(step) == pytest.approx(predicted_s, rel=0.03)
    assert upper_s <= model.upper(step) < 1.15 * upper_s


@pytest.mark.parametrize("slower", [0.8, 1.05, 1.3, 2.0])
@pytest.mark.parametrize("step", [shape(1, 200, 1), shape(1, 200, 32), shape(512, 0, 1)])
def test_a_device_that_changes_its_pace_is_followed(slower: float, step: StepFeatures) -> None:
    model, chance = profiled(by_sum, 0.02), random.Random(1)
    for _ in range(60):
        model.observe(step, slower * by_sum(step) * chance.lognormvariate(0, 0.02))
    assert model.predict(step) == pytest.approx(slower * by_sum(step), rel=0.05)


def test_a_change_seen_in_some_shapes_is_believed_of_all() -> None:
    model = profiled(by_sum)
    for _ in range(40):
        model.observe(shape(1, 200, 32), 1.3 * by_sum(shape(1, 200, 32)))
    assert model.predict(shape(256, 0, 1)) > 1.1 * by_sum(shape(256, 0, 1))


def test_a_step_behind_a_much_longer_one_is_known_to_be_slower() -> None:
    """Caches are cold there; elsewhere the same shape is not thought slower for it."""
    model, chance, short, long = profiled(by_sum, 0.02), random.Random(2), shape(1, 200, 1), shape(512, 0, 1)
    for number in range(1200):
        step = long if number % 4 == 0 else short
        cold = 1.3 if number % 4 == 1 else 1.0
        model.observe(step, cold * by_sum(step) * chance.lognormvariate(0, 0.02))
    model.observe(long, by_sum(long))
    assert model.predict(short) == pytest.approx(1.3 * by_sum(short), rel=0.08)
    model.observe(short, 1.3 * by_sum(short))
    assert model.predict(short) == pytest.approx(by_sum(short), rel=0.08)
    assert model.predict(long) == pytest.approx(by_sum(long), rel=0.05)


def test_what_slowed_a_short_step_is_expected_of_the_next_but_hardly_of_a_long_one() -> None:
    model, short, long = profiled(by_sum, 0.02), shape(1, 200, 1), shape(512, 0, 1)
    for _ in range(20):
        model.observe(short, by_sum(short))
    before = model.predict(short), model.predict(long)
    model.observe(short, 1.2 * model.predict(short))
    assert model.predict(short) > 1.04 * before[0]
    assert model.predict(long) < 1.02 * before[1]


def test_misses_widen_at_once_and_hits_narrow_slowly() -> None:
    model, step = profiled(by_sum, 0.02), shape(1, 200, 8)
    before = model.upper(step) / model.predict(step)
    for _ in range(5):
        model.observe(step, 1.5 * model.predict(step))
    wide = model.upper(step) / model.predict(step)
    assert model.missed >= 5 and wide > before * 1.1
    for _ in range(2000):
        model.observe(step, model.predict(step) * 0.99)
    assert 1.0 < model.upper(step) / model.predict(step) < wide


# The promise


def quiet(cost: Cost) -> Iterator[tuple[StepFeatures, float]]:
    chance = random.Random(3)
    while True:
        step = mixed(chance)
        yield step, cost(step) * chance.lognormvariate(0, 0.03)


def restless(cost: Cost) -> Iterator[tuple[StepFeatures, float]]:
    """Another process comes and goes and slows the core by up to 30 %; 3 steps in 1,000 are stopped for 50 ms."""
    chance, slow = random.Random(4), 1.0
    while True:
        if chance.random() < 0.003:
            slow = chance.uniform(1.0, 1.3)
        step = mixed(chance)
        yield step, slow * cost(step) * chance.lognormvariate(0, 0.03) + (0.05 if chance.random() < 0.003 else 0.0)


@pytest.mark.parametrize("cost", [by_sum, by_roofline, by_tiles])
@pytest.mark.parametrize("device", [quiet, restless])
def test_99_steps_in_100_stay_under_an_upper_estimate_that_is_not_far_off(device: Callable, cost: Cost) -> None:
    model, covered, ratios, errors = profiled(cost, 0.03), 0, [], []
    steps = device(cost)
    for _ in range(6000):
        step, taken_s = next(steps)
        predicted_s, upper_s = model.predict(step), model.upper(step)
        model.observe(step, taken_s)
        if model.is_refit_due:
            model.refit()
        covered += taken_s <= upper_s
        ratios.append(upper_s / taken_s)
        if taken_s >= 0.005:
            errors.append(abs(predicted_s / taken_s - 1))
    assert covered / 6000 >= 0.99
    assert sum(ratios) / len(ratios) <= (1.3 if device is quiet else 1.35)
    assert sum(errors) / len(errors) <= (0.05 if device is quiet else 0.07)


def test_coverage_does_not_depend_on_what_errors_look_like() -> None:
    """Errors without a mean: the estimate widens to what it must be, up to its limit."""
    model, chance, covered = profiled(by_sum), random.Random(0), 0
    for number in range(20_000):
        step = mixed(chance)
        taken_s = by_sum(step) * chance.paretovariate(2.5)
        covered += number >= 1000 and taken_s <= model.upper(step)
        model.observe(step, taken_s)
    assert covered / 19_000 >= 0.985


# Its size and its plan


def test_it_holds_a_bounded_number_of_steps_however_many_it_sees() -> None:
    model, chance = profiled(by_sum), random.Random(0)
    for _ in range(5000):
        step = StepFeatures(*(int(2 ** chance.uniform(0, bits)) for bits in (12, 18, 22, 8)))
        model.observe(step, 0.01)
    kept = [region.kept for region in model._regions.values()]
    assert len(kept) <= REGIONS_MAX and max(map(len, kept)) <= KEPT_PER_REGION
    assert model.refit()


@pytest.mark.parametrize("limits", [(512, 64, 4096), (1024, 256, 32768), (64, 4, 512), (8, 1, 64)])
def test_a_plan_can_be_run_within_the_engine_and_takes_a_bounded_number_of_tokens(limits: tuple[int, int, int]) -> None:
    step_tokens, sequences, context = limits
    plan = profile_plan(*limits)
    assert plan
    for planned in plan:
        assert 1 <= planned.requests <= min(sequences, planned.new_tokens)
        assert planned.new_tokens <= max(step_tokens, planned.requests)
        assert planned.context_tokens + planned.decode_steps <= context
    assert sum(planned.requests * planned.context_tokens for planned in plan) <= 20_000


@pytest.mark.parametrize("name", ["cpu", "cpu-frozenlake-1m", "h800-qwen3-8b"])
def test_a_profile_of_a_real_scheduler_foretells_its_other_steps(name: str) -> None:
    engine, model, steps = SimulatedEngine(load_profile(name)), LatencyModel(), []
    for index, planned in enumerate(profile_plan(512, 64, 4096)):
        for number in range(planned.requests):
            sampling = Sampling(max_tokens=planned.decode_steps, ignore_eos=True)
            prompt = tuple(range(planned.context_tokens))
            engine.add(Request(f"{number}", prompt, sampling, tenant=f"{index}/{number}"))
        while (plan := engine.plan(Budget(planned.new_tokens, planned.requests))) is not None:
            engine.step(plan)
            steps.append((plan.features, engine.last_step_s))
    assert model.fit(steps)
    cost = load_profile(name).step_s
    chance = random.Random(0)
    errors = [abs(model.predict(step) / cost(step) - 1) for step in (mixed(chance) for _ in range(500))]
    assert sum(errors) / len(errors) < 0.1
