"""The scenario of a simulated world, drawn from its seed: its parts, serving traffic, episodes, and rates of faults.

The next prompt of an episode is a function of the episode's number and of the answers alone. So an episode is the same
wherever its turns ran and whatever faults happened.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rose.api.requests import VersionSpan
from rose.core.admission import Mode
from rose.core.routing_rules import RouterKind
from rose.engines.base import Request, Sampling
from rose.gateway.sessions import Finish
from rose.sim.token_oracle import EOS, VOCABULARY


@dataclass(frozen=True, slots=True)
class Traffic:
    """Arrivals with `burst` as the squared variation of gaps: 1 is Poisson, more is bursty. Spikes come on top."""

    requests_per_s: float
    prompt_tokens: int = 100
    output_tokens: int = 20
    burst: float = 1.0
    spikes: int = 0
    spike_requests: int = 40
    spike_s: float = 0.5

    def arrivals(self, seed: int, until_s: float) -> list[tuple[float, Request]]:
        chance, times_s, now_s = random.Random(f"traffic {seed}"), [], 0.0
        while (now_s := now_s + chance.gammavariate(1 / self.burst, self.burst / self.requests_per_s)) <= until_s:
            times_s.append(now_s)
        for _ in range(self.spikes):
            begin_s = chance.uniform(0, until_s - self.spike_s)
            times_s += [begin_s + chance.uniform(0, self.spike_s) for _ in range(self.spike_requests)]
        return [(at_s, self._request(chance, number, at_s)) for number, at_s in enumerate(sorted(times_s))]

    def _request(self, chance: random.Random, number: int, arrival_s: float) -> Request:
        prompt = min(8 * self.prompt_tokens, 1 + int(chance.lognormvariate(0, 0.8) * self.prompt_tokens * 0.7))
        sampling = Sampling(
            max_tokens=1 + int(chance.expovariate(1 / self.output_tokens)), ignore_eos=True, seed=number
        )
        name = f"serving {number}"  # a tenant each, so that no request finds a cached prefix
        return Request(name, tuple(range(prompt)), sampling, tenant=name, arrival_s=arrival_s)


ROUTERS: tuple[RouterKind, ...] = ("cost", "cost", "cost", "paper", "cost", "paper")  # six: a seed keeps its world
MINUTES = 0.5  # of faults; then none until everything has ended


@dataclass(frozen=True, slots=True)
class Scenario:
    """The parameters of a world. `ahead` steps of groups begin before a batch is taken: 0 is synchronous."""

    seed: int
    trouble_s: float
    dedicated: int
    borrowed: int
    mode: Mode
    traffic: Traffic
    pages: int
    max_concurrency: int
    kv_blocks: int
    groups: int
    group_size: int
    turns_max: int
    tokens_max: int
    ahead: int
    max_staleness: int
    max_waiting: int
    wait_s: float
    lease_s: float
    beat_s: float
    idle_s: float
    think_s: float
    vanishing: float  # share of players that stop in the middle
    faults_per_s: float
    router: RouterKind
    borrowed_max: int | None  # the user's caps
    dedicated_max: int | None
    return_after_s: float
    coarseness: int = 1  # of dedicated devices: how many times longer a token takes, and how many steps are one event
    begun_at_once: int = 1  # groups that the trainer begins side by side

    @property
    def is_strict(self) -> bool:
        """Return whether every token of a batch must be of the newest version."""
        return self.ahead == 0 and self.max_staleness == 0

    @property
    def command(self) -> str:
        minutes = self.trouble_s / 60
        return f"rose sim --seed {self.seed}" + (f" --minutes {minutes:g}" if minutes != MINUTES else "")


def random_scenario(seed: int, minutes: float = MINUTES) -> Scenario:
    chance = random.Random(f"scenario {seed}")
    dedicated = chance.choice([0, 1, 1, 2])
    return Scenario(
        seed=seed,
        trouble_s=60 * minutes,
        dedicated=dedicated,
        borrowed=chance.choice([0, 1, 2, 3]) if dedicated else chance.choice([1, 2, 3]),
        mode=chance.choice(["idle", "decode", "decode"]),
        traffic=Traffic(chance.choice([0.3, 1.0, 2.0]), 24, 5, burst=chance.choice([1.0, 4.0])),
        pages=chance.choice([12, 48, 120] if dedicated else [48, 120]),
        max_concurrency=chance.choice([1, 2, 4, 8]),
        kv_blocks=chance.choice([32, 64, 256]),  # the longest turn needs 27
        groups=chance.randint(1, 4),
        group_size=chance.randint(2, 4),
        turns_max=chance.randint(1, 4),
        tokens_max=chance.choice([8, 32, 96]),
        ahead=chance.choice([0, 0, 1]),
        max_staleness=chance.choice([0, 0, 1, 2]),
        max_waiting=chance.choice([2, 8, 64]),
        wait_s=chance.choice([2.0, 10.0, 30.0]),
        lease_s=chance.choice([1.5, 3.0, 5.0]),
        beat_s=chance.choice([0.25, 0.5]),
        idle_s=90.0,
        think_s=chance.choice([0.01, 0.2, 1.0]),
        vanishing=chance.choice([0.0, 0.0, 0.0, 0.05]),
        faults_per_s=chance.choice([0.0, 0.2, 0.5, 1.0, 1.0]),
        router=chance.choice(ROUTERS),
        borrowed_max=chance.choice([None, None, None, 1, 2]),
        dedicated_max=chance.choice([None, None, None, 1]),
        return_after_s=chance.choice([0.5, 2.0, 30.0]),
    )


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """The answer of one turn, as its client received it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]


def versions_of(spans: Sequence[VersionSpan]) -> list[str]:
    """Return the version of each token."""
    return [span.version for span in spans for _ in range(span.start, span.end)]


SCRIPT_TOKENS = 6  # of an observation between two turns


@dataclass(slots=True)
class SimulatedEpisode:
    """The state of one trajectory at its player."""

    trajectory_id: str
    number: int
    turns: int
    seed: int
    sampling: Sampling
    asked: list[tuple[int, ...]] = field(default_factory=list)  # prompts, in order
    answers: list[tuple[int, ...]] = field(default_factory=list)
    is_vanishing: bool = False
    is_over: bool = False
    is_lost: bool = False

    def prompt(self) -> tuple[int, ...]:
        """Return the prompt of the next turn: everything so far, and an observation."""
        if not self.answers:
            return tuple(len(EOS) + (self.number >> shift) % 64 for shift in (0, 6, 12)) + (len(EOS),) * 5
        seed, words = sum(self.answers[-1]) + len(self.answers), VOCABULARY - len(EOS)
        observation = tuple(len(EOS) + (seed * (index + 7)) % words for index in range(SCRIPT_TOKENS))
        return self.asked[-1] + self.answers[-1] + observation

    @property
    def is_streaming(self) -> bool:
        """Return whether its player streams the tokens."""
        return self.number % 3 == 0

    @property
    def finish(self) -> Finish:
        reward = float(sum(map(sum, self.answers)) % 3)
        return Finish(reward, is_success=reward > 1)
