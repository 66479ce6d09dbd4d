"""What a simulated world is, drawn from its seed: who is in it, what they are to do, and what may go wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rose.core.admission import Mode
from rose.core.router import ROUTER_KINDS, RouterKind
from rose.sim.traffic import Traffic

MINUTES = 0.5  # of trouble; then calm, until everything is done


@dataclass(frozen=True, slots=True)
class Scenario:
    """`ahead` is how many steps' groups are begun before a batch is taken: 0 is synchronous."""

    seed: int
    trouble_s: float
    dedicated: int
    borrowed: int
    mode: Mode
    traffic: Traffic
    pages: int
    seats: int
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
    vanishing: float  # share of players that never come back
    faults_per_s: float
    router: RouterKind
    borrowed_max: int | None  # the user's caps
    dedicated_max: int | None
    return_after_s: float

    @property
    def is_strict(self) -> bool:
        """Every token of a batch is of the newest version, wherever it ran."""
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
        seats=chance.choice([1, 2, 4, 8]),
        kv_blocks=chance.choice([32, 64, 256]),  # the longest turn there is needs 27
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
        router=chance.choice(["cost", "cost", *ROUTER_KINDS]),
        borrowed_max=chance.choice([None, None, None, 1, 2]),
        dedicated_max=chance.choice([None, None, None, 1]),
        return_after_s=chance.choice([0.5, 2.0, 30.0]),
    )
