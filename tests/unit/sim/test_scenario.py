"""Scenarios, serving traffic and episodes follow from a seed."""

from __future__ import annotations

import dataclasses

from rose.engines.base import Sampling
from rose.gateway.sessions import Finish
from rose.sim.scenario import SimulatedEpisode, Traffic, random_scenario


def test_a_seed_gives_one_scenario() -> None:
    assert random_scenario(7) == random_scenario(7) != random_scenario(8)
    assert all(scenario.dedicated + scenario.borrowed > 0 for scenario in map(random_scenario, range(50)))


def test_the_command_repeats_the_world() -> None:
    assert random_scenario(7).command == "rose sim --seed 7"
    assert random_scenario(7, minutes=2).command == "rose sim --seed 7 --minutes 2"


def test_only_synchronous_training_on_policy_is_strict() -> None:
    strict = dataclasses.replace(random_scenario(1), ahead=0, max_staleness=0)
    assert strict.is_strict
    assert not dataclasses.replace(strict, ahead=1).is_strict
    assert not dataclasses.replace(strict, max_staleness=1).is_strict


def test_traffic_has_its_rate_and_its_spikes() -> None:
    traffic = Traffic(20.0, spikes=1, spike_requests=30, spike_s=0.5)
    arrivals = traffic.arrivals(3, 50.0)
    times_s = [at_s for at_s, _ in arrivals]
    assert arrivals == traffic.arrivals(3, 50.0) and times_s == sorted(times_s)
    assert 900 < len(times_s) < 1200 and times_s[0] > 0 and times_s[-1] <= 50.0
    assert max(sum(start <= at_s <= start + 0.5 for at_s in times_s) for start in times_s) >= 30
    assert len({request.tenant for _, request in arrivals}) == len(arrivals), "a tenant each"


def test_prompts_of_an_episode_follow_from_its_number_and_answers() -> None:
    def episode(number: int) -> SimulatedEpisode:
        return SimulatedEpisode("t", number, turns=2, seed=1, sampling=Sampling(max_tokens=8))

    one, same, other = episode(5), episode(5), episode(6)
    first = one.prompt()
    assert first == same.prompt() != other.prompt()
    for played, answer in ((one, (9, 9)), (same, (9, 9)), (other, (9, 10))):
        played.asked.append(first)
        played.answers.append(answer)
    assert one.prompt() == same.prompt() and one.prompt()[:-6] == (*first, 9, 9)
    assert one.prompt()[-6:] != other.prompt()[-6:]
    assert one.finish == Finish(0.0, is_success=False) and other.finish == Finish(1.0, is_success=False)
