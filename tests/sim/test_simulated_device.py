"""A lent device in virtual time: every promise checked at every step, over seeds, and what the modes are worth.

`rose.sim.simulated_device` asserts at each lent step; a test here only has to run it and look at the outcome.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time

import pytest

from rose.core.slo import Budgets, Tpot
from rose.engines.base import Request
from rose.sim.scenario import Traffic
from rose.sim.simulated_device import SEQUENCES, WIDE, Device, DeviceReport, DeviceWorld
from rose.sim.slo_invariants import ServedRequest

SIMULATE_S = float(os.environ.get("ROSE_SIMULATE_S", "30"))
SEEDS_MIN = 12
SEEDS_KEPT = (9,)
BURSTS = Traffic(30, burst=8.0, spikes=2)
PATIENT = Budgets(0.5, 0.15)
TPOTS: tuple[Tpot, ...] = ("mean", "every_gap")
LONG_S = 1e6  # a device that was observed for so long lends beside decoding at once
GPU = {"serving": "h800-qwen2.5-7b", "rollout": "h800-qwen3-8b"}


def run(world: DeviceWorld) -> DeviceReport:
    return Device(world).run()


def random_world(seed: int) -> DeviceWorld:
    """Anything that may happen to a device, by seed."""
    chance = random.Random(f"world {seed}")
    traffic = Traffic(
        chance.choice([5, 20, 60]), burst=chance.choice([1.0, 4.0]), spikes=chance.randint(0, 1), output_tokens=10
    )
    world = DeviceWorld(
        chance.choice(["idle", "decode", "decode", "paper"]),
        traffic,
        seed=seed,
        until_s=1.5,
        budgets=Budgets(chance.choice([0.2, 0.5]), chance.choice([0.05, 0.15])),
        noise=chance.choice([0.0, 0.03, 0.15]),
        stall_share=chance.choice([0.0, 0.005]),
        drift=chance.choice([1.0, 1.3]),
        breaks=chance.random() < 0.5,
        pages=chance.choice([0, 0, 100, 400]),
        trajectories=chance.choice([4, 32, 32, 150]),
        observed_s=chance.choice([0.0, LONG_S, LONG_S]),
        kv_tokens=chance.choice([0, 0, 4000]),
        swap_every_s=chance.choice([0.0, 0.5]),
    )
    return dataclasses.replace(world, budgets=dataclasses.replace(world.budgets, tpot=chance.choice(TPOTS)))


def test_every_seed_keeps_every_promise(capsys):
    """As many as a time allows, from 0 up; the first that fails is named, and belongs into SEEDS_KEPT."""
    begun_s, lent, evictions, seed = time.monotonic(), 0, 0, 0
    while time.monotonic() - begun_s < SIMULATE_S or seed < SEEDS_MIN:
        try:
            report = run(random_world(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {random_world(seed)}") from error
        lent, evictions, seed = lent + report.lent_steps, evictions + report.evictions, seed + 1
    with capsys.disabled():
        print(f" {seed} seeds, {lent} lent steps, {evictions} evictions", end="")
    assert lent > 0 and evictions > 0


@pytest.mark.parametrize("stall_share", [0.0, 0.002])
def test_decode_lends_what_idle_lends_until_bursts_are_known(stall_share):
    """A device that has just started: only `idle`'s rule holds, so both modes run the same steps at the same times."""
    world = DeviceWorld(None, Traffic(10), until_s=4.0, budgets=Budgets(0.26, 0.019), breaks=True, seed=3)
    world = dataclasses.replace(world, stall_share=stall_share)
    idle, decode = (run(dataclasses.replace(world, mode=mode)) for mode in ("idle", "decode"))
    assert len(idle.served) > 20 and idle.lent_steps > 100
    assert (decode.lent_steps, decode.lent_s, decode.rollout_tokens) == (
        idle.lent_steps,
        idle.lent_s,
        idle.rollout_tokens,
    )
    assert [one.ttft_s for one in decode.served] == [one.ttft_s for one in idle.served]


@pytest.mark.parametrize("seed", SEEDS_KEPT)
def test_a_seed_that_once_failed(seed):
    """`rose.sim.simulated_device` raises if a promise is broken; it can only have checked some if both sides ran."""
    report = run(random_world(seed))
    assert report.served and report.lent_steps > 0


def test_a_memory_storm_takes_pages_from_rollouts_and_nothing_from_serving():
    """A burst needs most of the pool at once; alone it copes, and so it does with rollouts all over the memory."""
    storm = Traffic(4, prompt_tokens=400, output_tokens=10, spikes=3, spike_requests=12, spike_s=0.2)
    world = DeviceWorld("decode", storm, seed=3, until_s=6, pages=400, budgets=Budgets(4.0, 1.0), observed_s=LONG_S)
    lent, alone = run(world), run(dataclasses.replace(world, mode=None))
    assert lent.evictions > 0
    assert lent.attainment(world.budgets) == alone.attainment(world.budgets) == 1.0


@pytest.mark.parametrize("stall_share", [0.0, 0.01])
def test_idle_delays_a_first_token_by_at_most_one_step(stall_share):
    report = run(DeviceWorld("idle", BURSTS, until_s=4, stall_share=stall_share))
    assert max(served.lent_steps for served in report.served) == 1
    assert max(served.lent_s for served in report.served) <= report.longest_lent_s


def test_idle_changes_no_gap_between_tokens():
    """Serving's noise is its own, so a request that decodes in company would show a step between its tokens."""
    quiet = DeviceWorld("idle", BURSTS, until_s=4, noise=0.0)
    alone = run(dataclasses.replace(quiet, mode=None))
    longest_s = max(served.longest_gap_s for served in run(quiet).served)
    assert longest_s <= 1.1 * max(served.longest_gap_s for served in alone.served)


def test_decode_costs_a_waiting_prompt_at_most_one_step_too():
    report = run(DeviceWorld("decode", BURSTS, until_s=3, observed_s=LONG_S))
    assert max(served.lent_steps for served in report.served) == 1


def test_decode_harvests_where_serving_is_always_busy():
    """At a fifth of its capacity a large device decodes all the time: idle finds nothing, decode most of it."""
    world = DeviceWorld("decode", Traffic(5, prompt_tokens=1000, output_tokens=60), until_s=5, observed_s=LONG_S, **GPU)
    decode, idle = run(world), run(dataclasses.replace(world, mode="idle"))
    assert decode.rollout_tokens_per_s > 2 * idle.rollout_tokens_per_s
    assert decode.attainment() == idle.attainment() == 1.0


def test_decode_lends_more_than_idle_where_prompts_often_wait():
    """At a third of capacity they often wait for each other, and nobody loses."""
    traffic = Traffic(10, prompt_tokens=285, output_tokens=52)
    world = DeviceWorld(None, traffic, seed=3, until_s=8, noise=0.1, observed_s=LONG_S)
    alone, idle, decode = (run(dataclasses.replace(world, mode=mode)) for mode in (None, "idle", "decode"))
    assert decode.rollout_tokens_per_s > 1.2 * idle.rollout_tokens_per_s
    assert decode.attainment() == alone.attainment() == 1.0


def test_paper_loses_under_bursts_where_decode_does_not():
    """Spikes that serving alone just survives; and the ledger knows whose fault it was."""
    spikes = Traffic(60, burst=4.0, spikes=2, spike_requests=40, spike_s=0.3, output_tokens=10)
    world = DeviceWorld(None, spikes, seed=3, until_s=4, observed_s=LONG_S)
    alone, decode, paper = (run(dataclasses.replace(world, mode=mode)) for mode in (None, "decode", "paper"))
    assert decode.attainment() >= alone.attainment() - 0.005
    assert paper.attainment() < decode.attainment() - 0.01
    assert [sum(breach.objective == "ttft" for breach in report.breaches) for report in (alone, decode)] == [0, 0]
    assert sum(breach.objective == "ttft" for breach in paper.breaches) > 10


def test_budgets_that_serving_itself_half_uses_up_are_kept():
    """Twice what 99 in 100 requests of serving alone need: a prompt between two tokens takes many tokens' worth, and
    lending that had used up its share of every gap made one request in thirty miss."""
    world = DeviceWorld(None, Traffic(6, prompt_tokens=285, output_tokens=52, burst=3.0), seed=2, until_s=40)
    alone = run(world)
    needed = (sorted(of)[int(0.99 * len(of))] for of in zip(*((one.ttft_s, one.tpot_s) for one in alone.served)))
    budgets = Budgets(*(2 * need_s for need_s in needed))
    decode = run(dataclasses.replace(world, mode="decode", budgets=budgets))
    assert decode.attainment(budgets) >= alone.attainment(budgets) - 0.002
    assert decode.rollout_tokens_per_s > 10_000, "between requests it lends as ever"


def test_no_answer_takes_longer_than_users_wait_for_it():
    """Every token comes in time, and still long answers took so long that their users had gone."""
    traffic = Traffic(1.5, prompt_tokens=40, output_tokens=60)
    patient = DeviceWorld("decode", traffic, seed=3, until_s=40, budgets=PATIENT, observed_s=LONG_S)
    hurried = dataclasses.replace(patient, budgets=dataclasses.replace(PATIENT, answer_s=6.0))
    alone, slow, quick = (run(world) for world in (dataclasses.replace(patient, mode=None), patient, hurried))
    assert max(answer_s(one) for one in alone.served) < 2.0
    assert sum(answer_s(one) > 6.0 for one in slow.served) > 3 and slow.attainment(PATIENT) == 1.0
    assert max(answer_s(one) for one in quick.served) < 6.0 and quick.attainment(PATIENT) == 1.0
    assert quick.rollout_tokens_per_s > 0.9 * slow.rollout_tokens_per_s


def answer_s(served: ServedRequest) -> float:
    return served.last_token_s - served.request.arrival_s


def test_stalls_are_counted_and_nothing_else_suffers():
    """Steps stopped for 50 ms: each a breach with its cause; the estimates do not run away with them."""
    calm = DeviceWorld("decode", Traffic(10, output_tokens=10), until_s=3, observed_s=LONG_S)
    stalled = run(dataclasses.replace(calm, stall_share=0.01))
    assert stalled.late_steps == sum(breach.objective == "step" for breach in stalled.breaches) > 0
    assert stalled.late_steps < 0.05 * stalled.lent_steps
    assert stalled.attainment() == 1.0


def test_a_slower_device_is_noticed():
    """From the middle on every step takes 30 % longer than profiled: some late steps, then none to speak of."""
    report = run(DeviceWorld("decode", Traffic(10, output_tokens=10), until_s=4, drift=1.3, observed_s=LONG_S))
    assert report.late_steps < 0.05 * report.lent_steps
    assert report.attainment() == 1.0


def test_the_breaker_ends_lending_that_goes_wrong():
    device = Device(DeviceWorld("paper", dataclasses.replace(BURSTS, spikes=4, spike_s=0.2), until_s=3, breaks=True))
    report = device.run()
    assert device.breaker is not None and device.breaker.trips == 1
    assert any("circuit breaker" in reason for reason in report.reasons)


def test_rollouts_without_a_seat_are_not_looked_at():
    """They could not run, and to list a flood of them before every step would cost serving's steps time."""
    arbiter = Device(DeviceWorld("decode", Traffic(1), trajectories=150)).arbiter
    assert arbiter.rollout_view().prompt_tokens > 0
    for _ in range(7):  # the shortest turn has one token more
        plan = arbiter.rollout.plan(WIDE)
        assert plan is not None
        arbiter.rollout.step(plan)
    view = arbiter.rollout_view()
    assert (view.decoding, view.prompt_tokens) == (SEQUENCES, 0)


def test_users_who_give_up_waiting_are_not_forgotten():
    """Who leaves late and without a first token is a miss; and a breach, where lending was in front of it."""
    device = Device(DeviceWorld("decode", Traffic(1), breaks=True))
    arbiter = device.arbiter
    for number in range(30):
        arbiter.add_serving(Request(f"r{number}", (1, 2, 3), arrival_s=float(number)))
        if number < 4:
            arbiter.accountant.on_lent_step(number + 0.1, number + 0.4, upper_s=1.0)
        found = arbiter.on_serving_gone(f"r{number}", number + (0.6 if number < 25 else 0.4))
        assert [breach.objective for breach in found] == (["ttft"] if number < 4 else [])
    assert arbiter.accountant.breaches == {"ttft": 4} and arbiter.accountant.open_accounts == 0
    assert "4 deadlines lost" in (device.breaker.why_stopped(30.0) or "")
    assert arbiter.on_serving_gone("r0", 99.0) == []


def test_a_device_that_is_always_stopped_is_hardly_lent():
    """Half of all steps stopped for 50 ms: a stopped step is no reason to lend more, and idle mode's bound holds."""
    report = run(DeviceWorld("idle", Traffic(10, output_tokens=10), until_s=3, stall_share=0.5))
    assert max(served.lent_steps for served in report.served) <= 1
    assert report.late_steps <= report.lent_steps < 100
