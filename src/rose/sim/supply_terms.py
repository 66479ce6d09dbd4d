"""The terms of borrowed devices in the batch model: when they are on offer, and what it takes before a turn runs there.

A serving device that lends is always on offer; its timeline says what it lends. A spot instance is on offer until it is
preempted, and boots again when capacity is back. A serverless function starts cold for every turn. A lost node is a
device that is off offer for a while.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass

from rose.engines.profiles import StepProfile
from rose.sim.lent_timeline import BIN_S, LentTimeline

ACTIVATION_S = 5.0  # to load a rollout model from host memory; the paper's figure for 32B


@dataclass(frozen=True, slots=True)
class OfferTimes:
    """The times at which a device goes off and on offer; it is on offer at the start."""

    switches_s: tuple[float, ...] = ()

    def is_on_offer(self, now_s: float) -> bool:
        return bisect_right(self.switches_s, now_s) % 2 == 0


@dataclass(frozen=True, slots=True)
class SupplyTerms:
    """What holds for all borrowed devices of a cluster; without `offers` they are always on offer."""

    activation_s: float = ACTIVATION_S
    cold_start_s: float = 0.0  # before every turn
    offers: tuple[OfferTimes, ...] = ()
    is_kept: bool = False  # between the steps of a job: then they are active when rollouts begin

    def is_on_offer(self, number: int, now_s: float) -> bool:
        return not self.offers or self.offers[number].is_on_offer(now_s)


def spot_offers(count: int, up_s: float, down_s: float, until_s: float, seed: int) -> tuple[OfferTimes, ...]:
    """Return when each of `count` spot instances is on offer; both durations are exponential with these means."""
    offers = []
    for number in range(count):
        chance, now_s = random.Random(f"spot {seed} {number}"), 0.0
        switches: list[float] = []
        while now_s < until_s:
            now_s += chance.expovariate(1 / (down_s if len(switches) % 2 else up_s))
            switches.append(now_s)
        offers.append(OfferTimes(tuple(switches)))
    return tuple(offers)


def unshared_timeline(profile: StepProfile) -> LentTimeline:
    """Return the timeline of a device without users: all of its time, all of its memory."""
    kv_tokens = profile.kv_memory_bytes // profile.kv_bytes_per_token
    return LentTimeline((1.0,) * 4, (kv_tokens,) * 4, (None,) * 4, 1.0, 0, tuple(BIN_S * edge for edge in range(5)))
