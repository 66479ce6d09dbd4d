"""By which rule rollouts should get memory back after a cut: the paper's (at the next weight swap) or hysteresis.

`core/memory.py`, the policy of the live device, is asked ten times a second of virtual time. Serving holds what its
requests hold: their prompts at once, their answers as they grow. Rollouts are always more than fit: each holds its
context, grows at a steady pace, ends, and makes room for the next; one that is evicted comes back when there is room
and computes its context again before it goes on. The pool is as large as makes serving's mean share of it `load`.
Keys, per traffic, load and rule: `rollout_tok_s` (new tokens, without those computed again), `of_ideal` (over a budget
that always leaves exactly the headroom and never evicts), `redone_share` (tokens computed again over all computed),
`cuts_per_hour`, `evictions_per_hour`, `short_samples` (samples in which serving needed more than the budget leaves,
before the cut that the same sample brings; the cut hands it over).

    python benchmarks/regrowth.py [--trace FILE ...] [--json FILE] [--quick]
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np

from rose.core.memory import (
    Evict,
    Holder,
    MemoryLimits,
    MemoryPolicy,
    MemorySampled,
    Regrowth,
    victims,
)
from rose.load.generators import generated
from rose.load.traces import Trace, read_trace

SAMPLE_S = 0.1
PAGES = 1024
SERVING_TTFT_S, SERVING_TPOT_S = 0.5, 0.05
ROLLOUT_TOK_S, ROLLOUT_PREFILL_TOK_S = 20.0, 2000.0
ROLLOUT_PAGES_MEDIAN, ROLLOUT_SIGMA, ROLLOUT_PAGES_MAX = 24.0, 0.8, 256
LOADS = (0.2, 0.4)
GENERATED = ("gamma:rate=4,cv=4", "spikes:rate=2,factor=8,every_s=120,for_s=20", "day:rate=4,swing=8")
RULES: dict[str, tuple[Regrowth, float]] = {
    "hysteresis": ("hysteresis", 60.0),
    "swap every 30 s": ("swap", 30.0),
    "swap every 60 s": ("swap", 60.0),
    "swap every 300 s": ("swap", 300.0),
}
COLUMNS = (
    "traffic", "load", "rule", "rollout_tok_s", "of_ideal", "redone_share", "cuts_per_hour", "evictions_per_hour",
    "short_samples",
)  # fmt: skip


def serving_tokens(trace: Trace, until_s: float) -> np.ndarray[Any, Any]:
    """What serving's requests hold, sample by sample."""
    samples = int(until_s / SAMPLE_S)
    begin = np.minimum((trace.arrival_s / SAMPLE_S).astype(int), samples)
    lives_s = SERVING_TTFT_S + trace.output_tokens * SERVING_TPOT_S
    end = np.minimum(((trace.arrival_s + lives_s) / SAMPLE_S).astype(int) + 1, samples)
    jumps, slopes = np.zeros(samples + 1), np.zeros(samples + 1)
    pace = trace.output_tokens / np.maximum(1, lives_s / SAMPLE_S)
    np.add.at(jumps, begin, trace.prompt_tokens)
    np.add.at(jumps, end, -trace.prompt_tokens - pace * (end - begin))
    np.add.at(slopes, begin, pace)
    np.add.at(slopes, end, -pace)
    return np.maximum(0.0, np.cumsum(jumps) + np.cumsum(np.cumsum(slopes)))[:samples]


@dataclass(slots=True)
class Rollout:
    """One trajectory: what it will hold, holds, and has yet to compute again before it goes on."""

    name: str
    tokens_end: float
    tokens: float
    owed: float = 0.0


class Rollouts:
    """As many as fit, always; the same ones in the same order for the same seed."""

    def __init__(self, tokens_per_page: float, seed: int) -> None:
        self._per_page, self._chance = tokens_per_page, random.Random(seed)
        self._running: list[Rollout] = []
        self._waiting: list[Rollout] = []
        self._begun = 0
        self.new_tokens = self.redone_tokens = 0.0
        self.evictions = 0

    def pages(self) -> int:
        return sum(self._pages(rollout) for rollout in self._running)

    def run(self, budget_pages: int) -> None:
        """One sample: who fits with all that it will hold begins or comes back, and everybody goes on."""
        promised = sum(self._pages_end(rollout) for rollout in self._running)
        while promised + self._pages_end(self._next()) <= budget_pages:
            promised += self._pages_end(self._waiting[0])
            self._running.append(self._waiting.pop(0))
        for rollout in self._running:
            self._go_on(rollout)
        self._running = [rollout for rollout in self._running if rollout.tokens < rollout.tokens_end]
        if self.pages() > budget_pages:
            self.make_room(self.pages() - budget_pages)

    def make_room(self, pages: int) -> None:
        """As the device does: whose eviction loses the least."""
        holders, page = [], 0
        for rollout in self._running:
            count = self._pages(rollout)
            holders.append(Holder(rollout.name, int(rollout.tokens), tuple(range(page, page + count))))
            page += count
        gone = set(victims(holders, 1, pages))
        for rollout in [rollout for rollout in self._running if rollout.name in gone]:
            self._evict(rollout)

    def forgive(self) -> None:
        """Whoever was evicted comes back as it was."""
        for rollout in self._waiting:
            rollout.owed = 0.0

    def _next(self) -> Rollout:
        if not self._waiting:
            self._begun += 1
            pages = min(ROLLOUT_PAGES_MAX, self._chance.lognormvariate(np.log(ROLLOUT_PAGES_MEDIAN), ROLLOUT_SIGMA))
            self._waiting.append(Rollout(f"{self._begun}", max(1.0, pages) * self._per_page, self._per_page / 2))
        return self._waiting[0]

    def _go_on(self, rollout: Rollout) -> None:
        redone = min(rollout.owed, ROLLOUT_PREFILL_TOK_S * SAMPLE_S)
        rollout.owed -= redone
        self.redone_tokens += redone
        if not rollout.owed:
            rollout.tokens += ROLLOUT_TOK_S * SAMPLE_S
            self.new_tokens += ROLLOUT_TOK_S * SAMPLE_S

    def _evict(self, rollout: Rollout) -> None:
        self._running.remove(rollout)
        rollout.owed = rollout.tokens
        self._waiting.insert(0, rollout)
        self.evictions += 1

    def _pages_end(self, rollout: Rollout) -> int:
        return int(rollout.tokens_end / self._per_page) + 1

    def _pages(self, rollout: Rollout) -> int:
        return int(rollout.tokens / self._per_page) + 1


def played(pages: np.ndarray[Any, Any], tokens_per_page: float, rule: str, seed: int) -> dict[str, Any]:
    regrowth, swap_s = RULES[rule]
    policy, rollouts = MemoryPolicy(PAGES, MemoryLimits(regrowth=regrowth)), Rollouts(tokens_per_page, seed)
    swap_samples, short = int(swap_s / SAMPLE_S), 0
    for sample, serving in enumerate(pages):
        serving = min(PAGES, int(serving))
        short += policy.budget_pages is not None and serving > PAGES - policy.budget_pages
        fact = MemorySampled(serving, rollouts.pages(), weights_swapped=sample % swap_samples == 0)
        for decision in policy.observe(fact, sample * SAMPLE_S):
            if isinstance(decision, Evict):
                rollouts.make_room(decision.pages_min)
        rollouts.run(policy.budget_pages or 0)
    return _figures(rollouts, len(pages), short) | {"cuts_per_hour": policy.cuts / _hours(len(pages))}


def ideal(pages: np.ndarray[Any, Any], tokens_per_page: float, seed: int) -> float:
    """New tokens a second with exactly the headroom kept, and nothing computed again."""
    rollouts, headroom = Rollouts(tokens_per_page, seed), int(PAGES * MemoryLimits().headroom_share)
    for serving in pages:
        rollouts.run(max(0, PAGES - headroom - int(serving)))
        rollouts.forgive()
    return rollouts.new_tokens / (len(pages) * SAMPLE_S)


def _hours(samples: int) -> float:
    return samples * SAMPLE_S / 3600


def _figures(rollouts: Rollouts, samples: int, short: int) -> dict[str, Any]:
    computed = rollouts.new_tokens + rollouts.redone_tokens
    return {
        "rollout_tok_s": rollouts.new_tokens / (samples * SAMPLE_S),
        "redone_share": rollouts.redone_tokens / max(1.0, computed),
        "evictions_per_hour": rollouts.evictions / _hours(samples),
        "short_samples": short,
    }


def traffics(arguments: Any, until_s: float) -> Iterator[tuple[str, Trace]]:
    for spec in GENERATED:
        yield spec, generated(spec, seed=arguments.seed, duration_s=until_s)
    for path in arguments.trace:
        yield path.name.partition(".")[0], read_trace(path)


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--trace", type=Path, nargs="*", default=[], metavar="FILE", help="recorded traffic as well")
    arguments = options.parse_args()
    begun, rows = harness.machine(), []
    until_s = 600.0 if arguments.quick else 3600.0
    for name, trace in traffics(arguments, until_s):
        tokens = serving_tokens(trace, until_s)
        for load in LOADS:
            per_page = max(1.0, float(tokens.mean()) / load / PAGES)
            pages = np.ceil(tokens / per_page)
            best = ideal(pages, per_page, arguments.seed)
            for rule in RULES:
                found = played(pages, per_page, rule, arguments.seed)
                rows.append({"traffic": name, "load": load, "rule": rule, **found})
                rows[-1]["of_ideal"] = found["rollout_tok_s"] / best if best else None
        print(f"{name}: {len(trace)} requests played", flush=True)
    harness.print_table(rows, COLUMNS)
    return harness.finish(arguments, "regrowth", rows, [], begun)


if __name__ == "__main__":
    raise SystemExit(main())
