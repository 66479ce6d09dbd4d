"""When borrowed devices are on offer, and what a turn waits for there."""

from __future__ import annotations

import pytest

from rose.core.router import Router
from rose.engines.profiles import load_profile
from rose.sim.batch_cluster import BatchCluster, PlannedTrajectory, PlannedTurn
from rose.sim.supply_terms import OfferTimes, SupplyTerms, spot_offers, unshared_timeline

PROFILE = load_profile("h800-qwen3-8b")


def run(terms: SupplyTerms, devices: int = 1) -> BatchCluster:
    turns = (PlannedTurn(500, 1000, 0.0), PlannedTurn(1600, 1000, 0.0))
    batch = [PlannedTrajectory(f"t{number}", "g", turns) for number in range(4)]
    lines = [unshared_timeline(PROFILE)] * devices
    cluster = BatchCluster(Router(), PROFILE, 0, lines, batch, terms=terms)
    cluster.run()
    return cluster


def test_offers_switch_at_their_times() -> None:
    offer = OfferTimes((10.0, 15.0, 40.0))
    assert [offer.is_on_offer(at) for at in (0.0, 9.9, 10.0, 14.9, 15.0, 39.0, 40.0, 1e9)] == [
        True, True, False, False, True, True, False, False,
    ]  # fmt: skip


def test_spot_instances_are_up_for_their_share_of_the_time() -> None:
    offers = spot_offers(50, 300.0, 100.0, 20_000.0, 0)
    samples = [offer.is_on_offer(at) for offer in offers for at in range(5000, 20_000, 50)]
    assert sum(samples) / len(samples) == pytest.approx(0.75, abs=0.03)
    assert offers == spot_offers(50, 300.0, 100.0, 20_000.0, 0)


def test_a_preempted_instance_loses_its_turns_and_boots_again() -> None:
    undisturbed = run(SupplyTerms(4.0))
    preempted = run(SupplyTerms(4.0, offers=(OfferTimes((8.0, 12.0)),)))
    assert preempted.result.evictions > 0 and undisturbed.result.evictions == 0
    assert preempted.result.completion_s > undisturbed.result.completion_s + 8
    assert len(preempted.result.end_s) == 4


def test_every_serverless_turn_starts_cold() -> None:
    warm, cold = run(SupplyTerms(1.0)), run(SupplyTerms(1.0, cold_start_s=3.0))
    assert cold.result.completion_s == pytest.approx(warm.result.completion_s + 2 * 3.0, abs=1.5)


def test_kept_devices_are_active_when_rollouts_begin() -> None:
    batch = [PlannedTrajectory("t", "g", (PlannedTurn(100, 200, 0.0),))]
    lines = [unshared_timeline(PROFILE)]
    times = [
        BatchCluster(Router(), PROFILE, 0, lines, batch, terms=SupplyTerms(50.0, is_kept=kept), start_s=7.0)
        .run()
        .completion_s
        for kept in (True, False)
    ]
    assert times[0] < 10 and times[1] > 50
