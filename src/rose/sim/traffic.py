"""Seeded serving traffic: when requests come and how long they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rose.engines.base import Request, Sampling


@dataclass(frozen=True, slots=True)
class Traffic:
    """`burst` is the squared variation of the gaps: 1 is Poisson, more comes in bursts; spikes come on top."""

    requests_per_s: float
    prompt_tokens: int = 100
    output_tokens: int = 20
    burst: float = 1.0
    spikes: int = 0
    spike_requests: int = 40
    spike_s: float = 0.5

    def arrivals(self, seed: int, until_s: float) -> list[tuple[float, Request]]:
        chance = random.Random(f"traffic {seed}")
        times_s = [*self._steady(chance, until_s), *self._spiky(chance, until_s)]
        return [
            (arrival_s, self._request(chance, number, arrival_s)) for number, arrival_s in enumerate(sorted(times_s))
        ]

    def _steady(self, chance: random.Random, until_s: float) -> Iterator[float]:
        now_s = 0.0
        while True:
            now_s += chance.gammavariate(1 / self.burst, self.burst / self.requests_per_s)
            if now_s > until_s:
                return
            yield now_s

    def _spiky(self, chance: random.Random, until_s: float) -> Iterator[float]:
        for _ in range(self.spikes):
            begin_s = chance.uniform(0, until_s - self.spike_s)
            yield from (begin_s + chance.uniform(0, self.spike_s) for _ in range(self.spike_requests))

    def _request(self, chance: random.Random, number: int, arrival_s: float) -> Request:
        prompt = min(8 * self.prompt_tokens, 1 + int(chance.lognormvariate(0, 0.8) * self.prompt_tokens * 0.7))
        sampling = Sampling(
            max_tokens=1 + int(chance.expovariate(1 / self.output_tokens)), ignore_eos=True, seed=number
        )
        name = f"serving {number}"  # a tenant each: nobody finds anybody's prefix
        return Request(name, tuple(range(prompt)), sampling, tenant=name, arrival_s=arrival_s)
