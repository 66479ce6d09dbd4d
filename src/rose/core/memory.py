"""How much of a device's KV memory the rollouts may hold, in pages of one pool; serving first.

Serving owns what the rollouts' budget leaves. It is never asked to run close: beyond what its requests hold, a
*headroom* stays free for it. While it grows into that room nothing happens, until more than half of the headroom is
used (the high watermark). Then at once: the rollouts' budget is halved, and cut further if half is not enough to put
serving under the watermark again; rollouts that no longer fit are evicted, and their pages are handed over. After
that the budget holds still. Cutting late costs a user's deadline, growing early costs a rollout its prefill twice.

                    watermark                handed over               room, long enough
        OPEN ----------------> PRESSURE -------------------> FROZEN ---------------------> REGROW --> OPEN
                                   ^-------------- watermark, from anywhere --------------'

Growing back never starts within `hold_s` of the last cut. By the rule `swap` (the paper's) it happens at the next
weight swap that finds room, to all that leaves the headroom free; by `hysteresis` a step at a time, each after
`step_s` in which it would have left the headroom free, the first after `hold_s` of that. Only a cut, or the device's
owner, lowers a budget. A pool is a promise of the system's: if it has no memory for a page that serving needs, that is
a cut too, by which rollouts give up as many pages as the system refused.

Lending makes serving's requests live longer, and a request that lives twice as long holds its memory twice as long:
the same traffic will need that much more. So the headroom is multiplied by `lending_stretch` (how much longer requests
live than alone, on average) and steps are divided by it; `status` shows both. `LendingStretch` counts it.

Facts in, decisions out: it is asked with every sample, before a step, and whenever serving asks for a page. Budgets
and not pages held are compared, so a decision counts from the moment it is made; `Evict` repeats until it is obeyed.
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

STRETCH_REQUESTS = 100  # a minute or so of a small device's traffic
STRETCH_SEEN_MAX = 20.0  # one request that waited through a long lull must not stand for all


class State(Enum):
    OPEN = "open"
    PRESSURE = "pressure"
    FROZEN = "frozen"
    REGROW = "regrow"


class Event(Enum):
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
    headroom_share: float = 0.2  # of the pool; the paper's
    watermark_share: float = 0.5  # of the headroom: half is left for what arrives while pages are handed over
    regrowth: Regrowth = "hysteresis"
    hold_s: float = 10.0
    step_share: float = 0.05  # of the pool
    step_s: float = 1.0
    stretch_max: float = 3.0  # beyond it the headroom would be most of the pool, and lending pointless anyway

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
            raise ConfigError(f"no rule of growth is called {self.regrowth!r}", hint="use swap or hysteresis")


@dataclass(frozen=True, slots=True)
class MemorySampled:
    """A fact: where the pages are. `serving_pages` hold blocks of its requests; what is only cached can go.

    `serving_asks_pages` is what serving needs for its next step beyond those; `owner_limit_pages` is the most the
    device's owner allows rollouts; `weights_swapped` says that new weights came since the last sample; the system has
    no memory for `refused_pages` of those that serving asks for.
    """

    serving_pages: int
    rollout_pages: int
    serving_asks_pages: int = 0
    lending_stretch: float = 1.0
    owner_limit_pages: int | None = None
    weights_swapped: bool = False
    refused_pages: int = 0


@dataclass(frozen=True, slots=True)
class SetRolloutBudget:
    """Rollouts hold at most this many pages from now on; the rest of the pool is serving's."""

    pages: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Take rollouts out until at least this many of their pages are free, and hand those over."""

    pages_min: int
    reason: str


Decision = SetRolloutBudget | Evict


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """For people, metrics and the journal."""

    state: State
    budget_pages: int
    headroom_pages: int
    lending_stretch: float
    cuts: int
    growths: int


class MemoryPolicy:
    """One per device. Give `observe` every sample; do what it returns, in order."""

    def __init__(self, pages_total: int, limits: MemoryLimits | None = None) -> None:
        self.limits = limits or MemoryLimits()
        self.pages_total = pages_total
        if self._headroom(1.0) >= pages_total:
            raise ConfigError(
                f"of a pool of {pages_total} pages the headroom leaves none to lend",
                hint="give the device more KV memory, use smaller pages or lower the headroom",
            )
        self.state = State.OPEN
        self.budget_pages: int | None = None  # not asked yet
        self.lending_stretch = 1.0
        self.cuts = self.growths = 0
        self._last_cut_s: float | None = None
        self._roomy_since_s: float | None = None
        self._last_growth_s = 0.0
        self._swap_seen = False

    def observe(self, sample: MemorySampled, now_s: float) -> list[Decision]:
        self.lending_stretch = min(max(1.0, sample.lending_stretch), self.limits.stretch_max)
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
        """A tenant has moved in anew: the next sample sets its budget, as the first one did."""
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
        return math.ceil(self.pages_total * self.limits.headroom_share * stretch - 1e-9)

    def _watermark_room(self) -> int:
        """Serving must have at least this many pages free."""
        return int(self._headroom(self.lending_stretch) * (1 - self.limits.watermark_share))

    def _target(self, sample: MemorySampled) -> int:
        """The largest budget that leaves serving its headroom."""
        needed = sample.serving_pages + sample.serving_asks_pages + self._headroom(self.lending_stretch)
        most = self.pages_total if sample.owner_limit_pages is None else sample.owner_limit_pages
        return max(0, min(self.pages_total - needed, most))

    def _most_under_watermark(self, sample: MemorySampled) -> int:
        needed = sample.serving_pages + sample.serving_asks_pages + self._watermark_room()
        return max(0, self.pages_total - needed)

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
        """A first step must be a whole one, so that a page more or less starts nothing."""
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


class LendingStretch:
    """How much longer serving's requests live because of lending: the mean over the last hundred or so that ended.

    Alone, a request would have lived without the rollout steps that ran in its time. That is cautious: what waits
    together is computed together, so serving's own steps are fewer with lending than alone.
    """

    def __init__(self) -> None:
        self.mean = 1.0
        self.requests = self.stretched = 0

    def finished(self, life_s: float, lent_s: float) -> None:
        """A request ended after `life_s`, of which rollout steps took `lent_s`."""
        if life_s <= 0:
            return
        stretch = min(life_s / max(life_s - lent_s, life_s / STRETCH_SEEN_MAX), STRETCH_SEEN_MAX)
        self.requests += 1
        self.stretched += lent_s > 0
        self.mean += (stretch - self.mean) / min(self.requests, STRETCH_REQUESTS)


@dataclass(frozen=True, slots=True)
class Holder:
    """A rollout request that runs: the blocks it holds, and the computed tokens that an eviction throws away."""

    request_id: str
    work_tokens: int
    blocks: tuple[int, ...]


def victims(holders: Sequence[Holder], blocks_per_page: int, pages: int) -> list[str]:
    """Whom to evict so that this many pages more hold nobody's blocks, with the least work lost.

    `holders` are all that hold blocks of the pool: a block that two share is free when both are gone. Two simple ways
    are tried, least work first and cheapest page first; both drop whoever turns out not to be needed, and the one that
    loses less wins. If all pages of all holders are not enough, everybody goes.
    """
    pages_of = {h.request_id: {block // blocks_per_page for block in h.blocks} for h in holders}
    users = Counter(page for held in pages_of.values() for page in held)
    pages = min(pages, len(users))
    work = {h.request_id: h.work_tokens for h in holders}
    ways = [
        _spared(sorted(way, key=lambda name: (work[name], name)), pages_of, users, pages)
        for way in (_least_work_first(holders, pages_of, users, pages), _cheapest_page_first(holders, pages_of, pages))
    ]
    return min(ways, key=lambda way: (sum(work[name] for name in way), len(way)))


def _least_work_first(
    holders: Sequence[Holder], pages_of: dict[str, set[int]], users: Counter[int], pages: int
) -> list[str]:
    left, freed, gone = users.copy(), 0, []
    for holder in sorted(holders, key=lambda h: (h.work_tokens, h.request_id)):
        if freed >= pages:
            break
        gone.append(holder.request_id)
        for page in pages_of[holder.request_id]:
            left[page] -= 1
            freed += left[page] == 0
    return gone


def _cheapest_page_first(holders: Sequence[Holder], pages_of: dict[str, set[int]], pages: int) -> list[str]:
    """Empty, again and again, the page whose remaining holders lose the least; a holder once out costs no more."""
    by_page: dict[int, list[Holder]] = {}
    for holder in holders:
        for page in pages_of[holder.request_id]:
            by_page.setdefault(page, []).append(holder)
    cost = {page: sum(h.work_tokens for h in inside) for page, inside in by_page.items()}
    queue = [(tokens, page) for page, tokens in cost.items()]
    heapq.heapify(queue)
    gone: dict[str, None] = {}
    done: set[int] = set()
    while len(done) < pages:
        tokens, page = heapq.heappop(queue)
        if page in done or tokens != cost[page]:
            continue
        done.add(page)
        for holder in by_page[page]:
            if holder.request_id in gone:
                continue
            gone[holder.request_id] = None
            for other in pages_of[holder.request_id] - done:
                cost[other] -= holder.work_tokens
                heapq.heappush(queue, (cost[other], other))
    return list(gone)


def _spared(gone: Sequence[str], pages_of: dict[str, set[int]], users: Counter[int], pages: int) -> list[str]:
    """Without those whose eviction turned out not to be needed; the last, who would lose most, is spared first."""
    left = users.copy()
    for name in gone:
        left.subtract(pages_of[name])
    freed = sum(count == 0 for count in left.values())
    kept = set()
    for name in reversed(gone):
        lost = sum(left[page] == 0 for page in pages_of[name])
        if freed - lost >= pages:
            freed -= lost
            left.update(pages_of[name])
            kept.add(name)
    return [name for name in gone if name not in kept]
