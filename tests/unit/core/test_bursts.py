"""The reserve for the next burst: what each arrival teaches, what is kept free, what is known before anything is."""

from __future__ import annotations

import random

import pytest

from rose.core.bursts import ARRIVALS_KEPT, BEYOND_MIN, BEYOND_SHARE, UNKNOWN_S, BurstReserve, Rise, SlotThresholds

WINDOW_S, SLOTS, LONG_AGO_S = 0.5, 64, 1e6
STEP_S, TOKENS = 0.01, 200  # two seconds alone


def known(window_s: float = WINDOW_S) -> BurstReserve:
    reserve = BurstReserve(window_s, SLOTS)
    reserve.restore(LONG_AGO_S, (), (), 0.0)
    return reserve


def arrive(reserve: BurstReserve, at_s: float, prompt_tokens: int = 10, output_tokens: float | None = TOKENS) -> Rise:
    rise = reserve.on_arrival(prompt_tokens, output_tokens, at_s)
    reserve.learn(rise)
    return rise


def steady(thresholds: SlotThresholds, until_s: float, every_s: float, *, from_s: float = 0.0) -> None:
    now_s = from_s
    while (now_s := now_s + every_s) < until_s:
        thresholds.on_arrival(now_s, 0.0, TOKENS, WINDOW_S)


def burst(thresholds: SlotThresholds, size: int, at_s: float, wait_s: float = 0.0) -> None:
    for number in range(size):
        thresholds.on_arrival(at_s + 0.0001 * number, wait_s, TOKENS, WINDOW_S)


# Slots


def slow(slots: int = SLOTS, pace_s: float = 10 * STEP_S, spare: int = 0) -> SlotThresholds:
    """Budgets allow a token to take ten times as long."""
    thresholds = SlotThresholds(slots, spare)
    thresholds.pace_s = pace_s
    thresholds.set_steps(lambda count: STEP_S)
    return thresholds


def test_without_a_burst_lending_may_fill_every_slot():
    thresholds = slow()
    steady(thresholds, 60.0, 0.5)
    assert thresholds.best == SLOTS


@pytest.mark.parametrize("size, most, least", [(30, 35 + BEYOND_MIN, 28), (50, 15 + BEYOND_MIN, 9)])
def test_a_burst_leaves_only_thresholds_at_which_it_finds_its_slots(size, most, least):
    thresholds = slow()
    steady(thresholds, 60.0, 0.25)
    burst(thresholds, size, 60.0)
    steady(thresholds, 65.0, 0.25, from_s=60.5)
    assert least <= thresholds.best <= most


@pytest.mark.parametrize("spare, least", [(8, 17), (32, 40), (SLOTS, 60)])
def test_spare_slots_stand_in_for_delayed_requests(spare, least):
    """Alone the burst of 50 finds 56 free slots: as many as delayed requests take from it are spare."""
    thresholds = slow(spare=spare)
    steady(thresholds, 60.0, 0.25)
    burst(thresholds, 50, 60.0)
    steady(thresholds, 65.0, 0.25, from_s=60.5)
    assert least <= thresholds.best


def test_the_largest_burst_finds_its_slots_whenever_it_comes():
    """Bursts came when few requests were here; the next one may come when as many are here as lending allows."""
    thresholds = slow(spare=SLOTS)
    for round_s in (60.0, 180.0):
        steady(thresholds, round_s, 0.25, from_s=round_s - 60)
        burst(thresholds, 50, round_s)
    steady(thresholds, 240.0, 0.25, from_s=180.5)
    assert thresholds.best > 2 * SLOTS - 50 == thresholds.limit(240.0)


def test_no_room_is_kept_beside_requests_that_serving_alone_would_have_too():
    thresholds = slow()
    burst(thresholds, 50, 60.0)
    assert thresholds.limit(60.1) >= 50
    assert thresholds.limit(90.0) < SLOTS - 40, "by then serving alone would have none of them"


def test_requests_that_budgets_hardly_slow_down_are_no_more_than_alone():
    """With a tight budget per token lending cannot make answers live longer: nothing has to be kept free for it."""
    thresholds = slow(pace_s=1.05 * STEP_S)
    steady(thresholds, 60.0, 0.25)
    burst(thresholds, 50, 60.0)
    steady(thresholds, 65.0, 0.25, from_s=60.5)
    assert thresholds.best == SLOTS


def test_a_burst_that_finds_no_slot_alone_either_teaches_nothing():
    thresholds = slow()
    steady(thresholds, 60.0, 0.25)
    burst(thresholds, SLOTS, 60.0)
    before = thresholds.best
    burst(thresholds, 50, 60.1)  # on top of the first, which fills all slots by itself
    steady(thresholds, 65.0, 0.25, from_s=60.5)
    assert thresholds.best == before


def test_requests_that_end_while_one_can_wait_make_room_for_it():
    patient, hasty = slow(), slow()
    for thresholds, wait_s in ((patient, 0.5), (hasty, 0.0)):
        steady(thresholds, 60.0, 0.1)
        burst(thresholds, 40, 60.0, wait_s)
        steady(thresholds, 65.0, 0.1, from_s=61.0)
    assert patient.best > hasty.best


def test_hardly_any_arrival_may_count_against_the_threshold():
    """A burst of fifty is fifty arrivals: of ten thousand ten may find no room."""
    assert int(BEYOND_SHARE * ARRIVALS_KEPT) == 10
    allowed = []
    for missed in (9, 10, 11):
        thresholds = SlotThresholds(SLOTS)
        thresholds.restore((ARRIVALS_KEPT, 0, *[0] * 24, *[missed] * 6))
        allowed.append(thresholds.best)
    assert allowed == [64, 64, 46]


def test_two_arrivals_without_a_slot_prove_nothing():
    allowed = []
    for missed in (BEYOND_MIN, BEYOND_MIN + 1):
        thresholds = SlotThresholds(SLOTS)
        thresholds.restore((100, 0, *[0] * 24, *[missed] * 6))
        allowed.append(thresholds.best)
    assert allowed == [64, 46]


def test_old_bursts_are_forgotten():
    thresholds = slow()
    steady(thresholds, 60.0, 0.25)
    burst(thresholds, 50, 60.0)
    steady(thresholds, 65.0, 0.25, from_s=61.0)
    assert thresholds.best < SLOTS / 2
    steady(thresholds, 65.0 + 0.5 * (ARRIVALS_KEPT + 1000), 0.5, from_s=65.0)
    assert thresholds.best == SLOTS


def test_thresholds_follow_the_number_of_requests_of_a_plain_simulation():
    """Serving alone, and the highest threshold, with the requests one by one in small steps of time."""
    chance, thresholds, now_s = random.Random(3), slow(8), 0.0
    lives: dict[int, list[float]] = {0: [], 8: []}
    for _ in range(300):
        gap_s, tokens = chance.expovariate(3.0), chance.randint(10, 200)
        for _ in range(int(gap_s / 0.001)):
            for threshold, left in lives.items():
                done = 0.01 if 0 < len(left) <= threshold else 0.1  # tokens in a millisecond
                lives[threshold] = [one - done for one in left if one > done]
        now_s += 0.001 * int(gap_s / 0.001)
        thresholds.on_arrival(now_s, 0.0, tokens, WINDOW_S)
        for left in lives.values():
            left.append(tokens)
        assert abs(thresholds._loads[0].here - len(lives[0])) <= 1
        assert abs(thresholds._loads[-1].here - len(lives[8])) <= 1


def test_little_is_lent_before_much_is_known():
    reserve = BurstReserve(WINDOW_S, SLOTS)
    assert reserve.running_max(5.0) == 0
    arrive(reserve, 5.0)
    reserve.on_departure(10, 5.1)
    assert reserve.running_max(5.0 + UNKNOWN_S) == 0
    half_s = 5.0 + 2 * UNKNOWN_S
    assert reserve.running_max(half_s) == 3 * SLOTS // 4
    assert reserve.kv_tokens(1000, half_s) == 250
    assert reserve.running_max(5.0 + 100 * UNKNOWN_S) == SLOTS - 1, "one slot is always kept free"


def test_arrivals_teach_nothing_of_slots_before_an_answer_has_ended():
    reserve = known()
    for number in range(200):
        arrive(reserve, 10 + 0.0001 * number, output_tokens=None)
    assert reserve.running_max(LONG_AGO_S) == SLOTS - 1


# KV memory


def test_the_prompts_of_a_burst_within_one_window_are_reserved_whole():
    reserve = known()
    for number in range(50):
        arrive(reserve, 10 + 0.0004 * number, prompt_tokens=7)
    reserve.running_max(20.0)
    assert reserve.kv_tokens(10_000, 20.0) == reserve.learnt_kv_tokens == 350


def test_arrivals_in_different_windows_do_not_add_up():
    reserve = known()
    assert [arrive(reserve, 10 + 0.6 * number).tokens for number in range(5)] == [10, 10, 10, 10, 10]


def test_a_rise_counts_from_the_lowest_level_of_the_window():
    reserve = known()
    for number in range(10):
        reserve.on_arrival(1, None, 0.001 * number)
    for number in range(6):
        reserve.on_departure(1, 10 + 0.001 * number)
    assert [arrive(reserve, 10.1 + 0.001 * number, 1).tokens for number in range(8)] == list(range(1, 9))


def test_the_level_is_compared_with_a_plain_list_of_events():
    chance, reserve, here, events = random.Random(3), known(), 0, []
    now_s = 0.0
    for _ in range(500):
        now_s += chance.expovariate(20)
        if here and chance.random() < 0.5:
            here -= 1
            reserve.on_departure(1, now_s)
            events.append((now_s, here))
            continue
        here += 1
        rise = reserve.on_arrival(1, None, now_s)
        before = [level for at_s, level in events if at_s <= now_s - WINDOW_S][-1:] or [0]
        within = [level for at_s, level in events if at_s > now_s - WINDOW_S]
        assert rise.tokens == here - min([*before, *within])
        events.append((now_s, here))


@pytest.mark.parametrize("bursts, reserved", [(1, 41), (20, 50)])
def test_one_arrival_in_a_thousand_may_lie_beyond_the_reserve(bursts, reserved):
    reserve = known()
    for _ in range(ARRIVALS_KEPT - 50 * bursts):
        reserve.learn(Rise(1))
    for _ in range(bursts):
        for size in range(50):
            reserve.learn(Rise(size + 1))
    assert reserve.learnt_kv_tokens in (reserved - 1, reserved)


def test_old_rises_are_forgotten():
    reserve = known()
    for _ in range(100):
        reserve.learn(Rise(40))
    for _ in range(ARRIVALS_KEPT):
        reserve.learn(Rise(2))
    assert reserve.learnt_kv_tokens == 2


def test_tokens_of_requests_that_end_while_one_can_wait_do_not_count():
    reserve = known()
    reserve.wait_s = 0.1
    for number in range(20):
        arrive(reserve, 10 + 0.001 * number, prompt_tokens=3)
    for number in range(15):
        reserve.on_departure(3, 10.05 + 0.001 * number)
    reserve.running_max(11.0)
    assert reserve.learnt_kv_tokens == 15


def test_a_rise_that_overloads_serving_alone_teaches_nothing():
    reserve = known()
    for number in range(100):
        rise = reserve.on_arrival(1, None, 10 + 0.001 * number)
        if number < 20:
            reserve.learn(rise)
    reserve.running_max(20.0)
    assert reserve.learnt_kv_tokens == 20


def test_the_reserve_is_never_more_than_there_is():
    reserve = known()
    for number in range(200):
        arrive(reserve, 1 + 0.0001 * number, prompt_tokens=1000)
    reserve.running_max(2.0)
    assert reserve.kv_tokens(5000, 2.0) == 5000


def test_arrivals_told_late_do_not_turn_back_time():
    reserve = known()
    arrive(reserve, 10.0)
    assert arrive(reserve, 9.9).tokens == 20


def test_what_was_learnt_outlives_an_engine():
    before = known()
    before.thresholds.pace_s = 10 * STEP_S
    before.thresholds.set_steps(lambda count: STEP_S)
    for number in range(200):
        arrive(before, 0.25 * number, prompt_tokens=5)
    for number in range(30):
        arrive(before, 50 + 0.001 * number, prompt_tokens=5)
    arrive(before, 60.0)
    assert before.thresholds.best < SLOTS
    after = BurstReserve(WINDOW_S, SLOTS)
    after.restore(before.observed_s(60.0), before.thresholds.snapshot(), before.largest_rises(16), now_s=1000.0)
    assert after.thresholds.best == before.thresholds.best
    assert after.learnt_kv_tokens == before.learnt_kv_tokens > 0


def test_what_was_learnt_of_another_number_of_slots_is_not_taken_over():
    after = SlotThresholds(8)
    after.restore((100, 0, *[5] * 20))
    assert after.best == 8


def test_a_full_device_that_is_slower_needs_a_larger_reserve():
    """On a CPU a step takes longer the more requests it has: answers of a burst hold their slots for longer."""
    found = []
    for slowdown in (0.0, 0.05):
        thresholds = slow()
        thresholds.set_steps(lambda count, slowdown=slowdown: STEP_S * (1 + slowdown * count))
        steady(thresholds, 60.0, 0.1)
        burst(thresholds, 30, 60.0, wait_s=0.3)
        steady(thresholds, 65.0, 0.1, from_s=60.5)
        found.append(thresholds.best)
    assert found[0] > found[1]
