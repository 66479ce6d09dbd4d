"""The KV memory that rollouts may hold on a device, in pages of one pool; serving goes first.

Serving owns what the rollouts' budget leaves. Beyond the pages of its requests a *headroom* stays free for it: a share
of the pool, or what the next burst needs if that is more. When serving uses more than half of the headroom (the high
watermark), the rollouts' budget is halved, and cut further until serving is under the watermark again. Rollouts that
no longer fit are evicted and hand their pages over. Then the budget stays constant for a while: a late cut costs a
user's deadline, early growth costs a rollout its prefill twice.

                    watermark                handed over               room, long enough
        OPEN ----------------> PRESSURE -------------------> FROZEN ---------------------> REGROW --> OPEN
                                   ^-------------- watermark, from anywhere --------------'

The budget never grows within `hold_s` of the last cut. With `swap` (the paper's rule) it grows at the next weight swap
that finds room, to all that leaves the headroom free. With `hysteresis` it grows by a step every `step_s` in which the
headroom stayed free, at first after `hold_s`. Only a cut or the owner's limit lowers it. If the system refuses memory
for a page that serving needs, the budget is cut by the refused pages.

Lending prolongs serving requests, so the same traffic holds more memory. The headroom is multiplied, and steps are
divided, by `lending_stretch`, the residence-time inflation that `ResidenceInflation` measures.

`observe` is called with every sample: before a step, and whenever serving asks for a page. Budgets are compared, not
pages held, so a decision counts at once; `Evict` repeats until it is executed.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rose.errors import ConfigError

Regrowth = Literal["swap", "hysteresis"]

STRETCH_REQUESTS = 100  # about a minute of a small device's traffic
BURST_SHARE_MAX = 0.8  # of the pool as headroom for bursts: less than the rest is not worth lending
STRETCH_SEEN_MAX = 20.0  # bounds the weight of a single request


class State(Enum):
    """The state of the budget."""

    OPEN = "open"
    PRESSURE = "pressure"
    FROZEN = "frozen"
    REGROW = "regrow"


class Event(Enum):
    """What moves the budget to another state."""

    WATERMARK_CROSSED = "serving is over its high watermark"
    HANDED_OVER = "rollouts hold no more than their budget"
    GROWTH_DUE = "there was room for long enough, or new weights"
    FULLY_GROWN = "the budget is all that leaves the headroom free"


NEXT: dict[State, dict[Event, State]] = {
    State.OPEN: {Event.WATERMARK_CROSSED: State.PRESSURE, Event.GROWTH_DUE: State.REGROW},
    State.PRESSURE: {Event.WATERMARK_CROSSED: State.PRESSURE, Event.HANDED_OVER: State.FROZEN},
    State.FROZEN: {Event.WATERMARK_CROSSED: State.PRESSURE, Event.GROWTH_DUE: State.REGROW},
    State.REGROW: {
        Event.WATERMARK_CROSSED: State.PRESSURE,
        Event.GROWTH_DUE: State.REGROW,
        Event.FULLY_GROWN: State.OPEN,
    },
}


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The settings of the policy."""

    headroom_share: float = 0.2  # of the pool; the paper's
    watermark_share: float = 0.5  # of the headroom: half remains for arrivals while pages are handed over
    regrowth: Regrowth = "hysteresis"
    hold_s: float = 10.0
    step_share: float = 0.05  # of the pool
    step_s: float = 1.0
    stretch_max: float = 3.0  # beyond it the headroom would be most of the pool

    def __post_init__(self) -> None:
        if not 0 < self.headroom_share < 1:
            raise ConfigError(f"a headroom of {self.headroom_share:g} of the pool is not between 0 and 1")
        if not 0 < self.watermark_share <= 1:
            raise ConfigError(f"a watermark at {self.watermark_share:g} of the headroom is not between 0 and 1")
        if self.hold_s < 0 or self.step_s < 0 or not 0 < self.step_share <= 1 or self.stretch_max < 1:
            raise ConfigError(
                "hold and step times are not negative, a step is a share of the pool, a stretch at least 1"
            )
        if self.regrowth not in ("swap", "hysteresis"):
            raise ConfigError(f"unknown regrowth rule {self.regrowth!r}", hint="use swap or hysteresis")


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """A fact: who holds the pages. `serving_pages` hold blocks of requests, without the prefix cache.

    `serving_asks_pages` is what serving needs beyond those for its next step. `owner_limit_pages` is the owner's limit
    for rollouts. `weights_swapped` says that new weights arrived since the last sample. The system refused memory for
    `refused_pages` of those that serving asks for. The next burst of requests may need `burst_pages`.
    """

    serving_pages: int
    rollout_pages: int
    serving_asks_pages: int = 0
    lending_stretch: float = 1.0
    owner_limit_pages: int | None = None
    weights_swapped: bool = False
    refused_pages: int = 0
    burst_pages: int = 0


@dataclass(frozen=True, slots=True)
class SetRolloutBudget:
    """Limit rollouts to this many pages; the rest of the pool is serving's."""

    pages: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict rollouts until at least this many of their pages are free, and hand these to serving."""

    pages_min: int
    reason: str


Decision = SetRolloutBudget | Evict


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """The state of the policy, for people, metrics and the journal."""

    state: State
    budget_pages: int
    headroom_pages: int
    lending_stretch: float
    cuts: int
    growths: int


class MemoryPolicy:
    """The policy of a device. Pass every sample to `observe` and execute what it returns, in order."""

    def __init__(self, pages_total: int, limits: MemoryLimits | None = None) -> None:
        self.limits = limits or MemoryLimits()
        self.pages_total, self._burst_pages = pages_total, 0
        if self._headroom(1.0) >= pages_total:
            raise ConfigError(
                f"of a pool of {pages_total} pages the headroom leaves none to lend",
                hint="give the device more KV memory, use smaller pages or lower the headroom",
            )
        self.state = State.OPEN
        self.budget_pages: int | None = None  # before the first sample
        self.lending_stretch = 1.0
        self.cuts = self.growths = 0
        self._last_cut_s: float | None = None
        self._roomy_since_s: float | None = None
        self._last_growth_s = 0.0
        self._swap_seen = False

    def observe(self, sample: MemorySampled, now_s: float) -> list[Decision]:
        self.lending_stretch = min(max(1.0, sample.lending_stretch), self.limits.stretch_max)
        self._burst_pages = sample.burst_pages
        self._swap_seen |= sample.weights_swapped
        decisions: list[Decision] = []
        if self.budget_pages is None:
            decisions += self._set(self._target(sample), "what leaves serving its headroom")
            self._swap_seen = False
        limit = sample.owner_limit_pages
        if limit is not None and limit < self._budget:
            decisions += self._set(limit, f"the owner allows {limit} pages")
        if self._over_watermark(sample) or (sample.refused_pages and sample.rollout_pages):
            decisions += self._cut(sample, now_s)
        elif self.state is not State.PRESSURE:
            decisions += self._grow(sample, now_s)
        return decisions + self._evict(sample)

    def restart(self) -> None:
        """Forget the budget: a rollout model was loaded again, and the next sample sets a new one."""
        self.state, self.budget_pages = State.OPEN, None
        self._last_cut_s = self._roomy_since_s = None
        self._swap_seen = False

    def status(self) -> MemoryStatus:
        headroom = self._headroom(self.lending_stretch)
        return MemoryStatus(self.state, self._budget, headroom, self.lending_stretch, self.cuts, self.growths)

    @property
    def _budget(self) -> int:
        return self.budget_pages or 0

    def _headroom(self, stretch: float) -> int:
        usual = math.ceil(self.pages_total * self.limits.headroom_share * stretch - 1e-9)
        # A burst that stays under the watermark finds its pages free: none has to be taken back while it waits.
        burst = math.ceil(self._burst_pages / self.limits.watermark_share)
        return max(usual, min(burst, int(self.pages_total * BURST_SHARE_MAX)))

    def _target(self, sample: MemorySampled) -> int:
        """Return the largest budget that leaves serving its headroom."""
        needed = sample.serving_pages + sample.serving_asks_pages + self._headroom(self.lending_stretch)
        most = self.pages_total if sample.owner_limit_pages is None else sample.owner_limit_pages
        return max(0, min(self.pages_total - needed, most))

    def _most_under_watermark(self, sample: MemorySampled) -> int:
        free = int(self._headroom(self.lending_stretch) * (1 - self.limits.watermark_share))
        return max(0, self.pages_total - sample.serving_pages - sample.serving_asks_pages - free)

    def _over_watermark(self, sample: MemorySampled) -> bool:
        return self._budget > self._most_under_watermark(sample)

    def _cut(self, sample: MemorySampled, now_s: float) -> list[Decision]:
        self._move(Event.WATERMARK_CROSSED)
        self.cuts += 1
        self._last_cut_s, self._roomy_since_s = now_s, None
        self._swap_seen = False
        pages, reason = self._budget, ""
        if self._over_watermark(sample):
            held = sample.serving_pages + sample.serving_asks_pages
            pages = min(self._budget // 2, self._most_under_watermark(sample))
            reason = f"serving needs {held} pages and has {self.pages_total - self._budget}"
        left = max(0, sample.rollout_pages - sample.refused_pages)
        if sample.refused_pages and left < pages:
            pages, reason = left, f"the system has no memory for {sample.refused_pages} pages that serving needs"
        return self._set(pages, reason)

    def _grow(self, sample: MemorySampled, now_s: float) -> list[Decision]:
        target = self._target(sample)
        if target < self._budget + self._least_growth():
            self._roomy_since_s, self._swap_seen = None, False
            if self.state is State.REGROW:
                self._move(Event.FULLY_GROWN)
            return []
        if self._roomy_since_s is None:
            self._roomy_since_s = now_s
        if not self._is_due(now_s):
            return []
        self._move(Event.GROWTH_DUE)
        self.growths += 1
        self._last_growth_s, self._swap_seen = now_s, False
        if self.limits.regrowth == "hysteresis" and self._budget + self._step() < target:
            return self._set(self._budget + self._step(), "serving left room for long enough")
        self._move(Event.FULLY_GROWN)
        return self._set(target, "all that leaves serving its headroom")

    def _is_due(self, now_s: float) -> bool:
        if self._last_cut_s is not None and now_s - self._last_cut_s < self.limits.hold_s:
            return False
        if self.limits.regrowth == "swap":
            return self._swap_seen
        quiet_s = self.limits.step_s if self.state is State.REGROW else self.limits.hold_s
        assert self._roomy_since_s is not None
        is_quiet = now_s - self._roomy_since_s >= quiet_s
        return is_quiet and now_s - self._last_growth_s >= self.limits.step_s

    def _least_growth(self) -> int:
        """Return the least growth; the first step must be a whole one, so that single pages start nothing."""
        is_first_step = self.limits.regrowth == "hysteresis" and self.state is not State.REGROW
        return self._step() if is_first_step else 1

    def _step(self) -> int:
        return max(1, int(self.pages_total * self.limits.step_share / self.lending_stretch))

    def _evict(self, sample: MemorySampled) -> list[Decision]:
        over = sample.rollout_pages - self._budget
        if over > 0:
            return [Evict(over, f"rollouts hold {sample.rollout_pages} pages of {self._budget}")]
        if self.state is State.PRESSURE:
            self._move(Event.HANDED_OVER)
        return []

    def _set(self, pages: int, reason: str) -> list[Decision]:
        if pages == self.budget_pages:
            return []
        self.budget_pages = pages
        return [SetRolloutBudget(pages, reason)]

    def _move(self, event: Event) -> None:
        self.state = NEXT[self.state][event]


class ResidenceInflation:
    """How much longer serving requests live because of lending: the mean over about the last hundred.

    A request's time without lending is its time without the rollout steps in it. That is an upper bound of the
    inflation, since requests that wait together are then computed together.
    """

    def __init__(self) -> None:
        self.mean = 1.0
        self.requests = self.stretched = 0

    def on_finished(self, life_s: float, lent_s: float) -> None:
        """Record a request that ended after `life_s`, of which rollout steps took `lent_s`."""
        if life_s <= 0:
            return
        stretch = min(life_s / max(life_s - lent_s, life_s / STRETCH_SEEN_MAX), STRETCH_SEEN_MAX)
        self.requests += 1
        self.stretched += lent_s > 0
        self.mean += (stretch - self.mean) / min(self.requests, STRETCH_REQUESTS)


@dataclass(frozen=True, slots=True)
class Holder:
    """A running rollout request: its blocks, and the computed tokens that an eviction loses."""

    request_id: str
    work_tokens: int
    blocks: tuple[int, ...]


def victims(holders: Sequence[Holder], blocks_per_page: int, pages: int) -> list[str]:
    """Return the requests to evict so that this many more pages become empty, with little work lost.

    `holders` are all requests with blocks in the pool: a shared block is free when all its holders are evicted. Two
    greedy orders are tried, least work first and cheapest page first. Unneeded evictions are removed from both, and
    the one that loses less work wins. If all pages are not enough, all holders are evicted.
    """
    pages_of = {h.request_id: {block // blocks_per_page for block in h.blocks} for h in holders}
    users = Counter(page for held in pages_of.values() for page in held)
    pages = min(pages, len(users))
    work = {h.request_id: h.work_tokens for h in holders}
    ways = [
        _without_unneeded(sorted(way, key=lambda name: (work[name], name)), pages_of, users, pages)
        for way in (_least_work_first(holders, pages_of, users, pages), _cheapest_page_first(holders, pages_of, pages))
    ]
    return min(ways, key=lambda way: (sum(work[name] for name in way), len(way)))


def _least_work_first(
    holders: Sequence[Holder], pages_of: dict[str, set[int]], users: Counter[int], pages: int
) -> list[str]:
    left, freed, evicted = users.copy(), 0, []
    for holder in sorted(holders, key=lambda h: (h.work_tokens, h.request_id)):
        if freed >= pages:
            break
        evicted.append(holder.request_id)
        for page in pages_of[holder.request_id]:
            left[page] -= 1
            freed += left[page] == 0
    return evicted


def _cheapest_page_first(holders: Sequence[Holder], pages_of: dict[str, set[int]], pages: int) -> list[str]:
    """Return requests to evict, emptying the page whose remaining holders lose the least work first."""
    by_page: dict[int, list[Holder]] = {}
    for holder in holders:
        for page in pages_of[holder.request_id]:
            by_page.setdefault(page, []).append(holder)
    cost = {page: sum(h.work_tokens for h in inside) for page, inside in by_page.items()}
    queue = [(tokens, page) for page, tokens in cost.items()]
    heapq.heapify(queue)
    evicted: dict[str, None] = {}
    done: set[int] = set()
    while len(done) < pages:
        tokens, page = heapq.heappop(queue)
        if page in done or tokens != cost[page]:
            continue
        done.add(page)
        for holder in by_page[page]:
            if holder.request_id in evicted:
                continue
            evicted[holder.request_id] = None
            for other in pages_of[holder.request_id] - done:
                cost[other] -= holder.work_tokens
                heapq.heappush(queue, (cost[other], other))
    return list(evicted)


def _without_unneeded(
    evicted: Sequence[str], pages_of: dict[str, set[int]], users: Counter[int], pages: int
) -> list[str]:
    """Remove evictions that are not needed, those that lose most work first."""
    left = users.copy()
    for name in evicted:
        left.subtract(pages_of[name])
    freed = sum(count == 0 for count in left.values())
    kept = set()
    for name in reversed(evicted):
        lost = sum(left[page] == 0 for page in pages_of[name])
        if freed - lost >= pages:
            freed -= lost
            left.update(pages_of[name])
            kept.add(name)
    return [name for name in evicted if name not in kept]
