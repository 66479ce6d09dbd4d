"""What KV pages cost to get and to hand over, how many a model holds, and what it loses when some are wanted back.

Cost: 1 GiB in pages of 2 MiB, touched every 4 KiB. `grow` creates pages and maps them; `hand_over` moves pages that
were in use from one model's range to the other's, in one piece or scattered (no two neighbours stay neighbours, so that
every page is a system call of its own); `plain` is fresh private memory, which cannot change hands at all. Each repeat
does all of them, and the ratio is taken within a repeat. Zeroing the value half of blocks costs the same for all.
`copy` moves single blocks of the rollout model from page to page, as a device does to clear pages.

Holding: requests come and go over a block pool. `held_over_needed` is the pages in which a request holds a block over
those that these blocks would fill. `ours` places a block in the fullest page; when pages are wanted back it moves
requests' blocks together, no more at once than a device does, and drops the cache by page. `ours_unmoved` only drops.
`last_page_first` is what kvcached does: the page touched last, and cached blocks dropped one by one, least recently
used first; `first_fit` takes the lowest free block and drops the same way. Two kinds of traffic:

    decode    single requests with long-tailed lengths, load rising and falling between 4 and 64; nothing is cached
    turns     64 trajectories of many turns with pauses between them, on a pool too small to cache them all; a turn
              finds its prefix if that is still cached. Every 200 steps a quarter of the pages is wanted back at once
              and without evicting a request: `got_back` of them came, each at the cost of `dropped_per_page` cached
              blocks, and of copying `moved_per_page`. To get the others, requests with `lost_share` of all computed
              tokens would have to go.

`--trajectories FILE` adds turns with the lengths of recorded agents (CSV, also gzipped, one row per model call, columns
traj, turn and tokens or characters). With ROSE_DATA set, trajectories/taubench_airline_gpt4o.csv.gz there is used.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import math
import mmap
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy as np

from rose.core.memory import Holder, victims
from rose.device.pages import PAGE_BYTES, PagePool, VirtualRange
from rose.device.tenancy import MOVED_BYTES_MAX
from rose.engines.blocks import BlockPool, PagesByOccupancy, block_digest, root_digest
from rose.engines.embedded.runner import KvMemory

GIB = 1 << 30
BLOCK_TOKENS = 16
PER_PAGE = {"qwen3-25m": 8, "qwen3-3m": 32, "frozenlake-1m": 128}  # blocks in a page of 2 MiB
RUNNING_MAX, RUNNING_MIN, LOAD_PERIOD_STEPS = 64, 4, 2000
PAUSE_STEPS = (5, 80)
POOL_BLOCKS = {"decode": 16_384, "turns": 1_024, "recorded turns": 8_192}
RECLAIM_STEPS, RECLAIM_SHARE = 200, 0.25
WARM_UP_STEPS = 500
CONTEXT_TOKENS = 4096
COST_COLUMNS = ("case", "ms", "ms_low", "ms_high", "us_per_page", "grow_over_this")
HOLD_COLUMNS = (
    "case", "model", "blocks_per_page", "method", "held_over_needed", "held_over_needed_p95", "pages_needed",
    "hit_rate", "got_back", "dropped_per_page", "moved_per_page", "lost_share", "us_per_call",
)  # fmt: skip


# The cost of memory


def touch(floats: Any) -> None:
    floats[:: mmap.PAGESIZE // 4] = 1.0


def timed_ms(action: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    action()
    return (time.perf_counter() - begin_s) * 1e3


def plain(size: int) -> None:
    touch(np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32))


def copy_ms(floats: Any, rng: random.Random) -> float:
    """Half of the blocks to where the other half was, in no order; as if all of them were copied."""
    blocks = floats.nbytes // PAGE_BYTES * PER_PAGE["frozenlake-1m"]
    mixed, memory = rng.sample(range(blocks), blocks), KvMemory(floats, BlockPool(blocks))
    moves = dict(zip(mixed[::2], mixed[1::2], strict=True))
    return 2 * timed_ms(lambda: memory.copy(moves))


def cost_of_one_repeat(size: int, rng: random.Random) -> dict[str, float]:
    pages = size // PAGE_BYTES
    pool = PagePool(pages)
    one, other = (VirtualRange(pool, pages, name) for name in ("one", "other"))
    whole, scattered = list(range(pages)), rng.sample(range(pages), pages)

    def grow() -> None:
        one.map(whole, pool.create(pages))
        touch(one.floats())

    def move(source: VirtualRange, places: Sequence[int], target: VirtualRange) -> None:
        target.map(whole, source.unmap(places))
        touch(target.floats())

    def give_up() -> None:
        one.unmap(whole)
        pool.release_spare()

    found = {"grow": timed_ms(grow), "hand_over": timed_ms(lambda: move(one, whole, other))}
    found["hand_over_scattered"] = timed_ms(lambda: move(other, scattered, one))
    assert pool.resident_bytes() == size
    found["copy"] = copy_ms(one.floats(), rng)
    found["release"] = timed_ms(give_up)
    assert pool.resident_bytes() == 0, "memory that was released is still held"
    for memory in (one, other):
        memory.free()
    pool.close()
    found["plain"] = timed_ms(lambda: plain(size))
    return found


def measure_cost(arguments: Any) -> list[dict[str, Any]]:
    rng = random.Random(arguments.seed)
    cost_of_one_repeat(GIB, rng)  # the first touch of a machine's memory is dearer than all later ones
    repeats = []
    for number in range(arguments.repeats):
        print(f"\rmemory: repeat {number + 1} of {arguments.repeats}", end="", flush=True)
        repeats.append(cost_of_one_repeat(GIB, rng))
    print()
    rows = []
    for case in repeats[0]:
        row: dict[str, Any] = {"case": case, "gib": 1}
        harness.put_ratio(row, "ms", [repeat[case] for repeat in repeats])
        row["us_per_page"] = round(row["ms"] * 1e3 / (GIB // PAGE_BYTES), 1)
        harness.put_ratio(row, "grow_over_this", [repeat["grow"] / repeat[case] for repeat in repeats])
        rows.append(row)
    return rows


# Placements


class FirstFit(PagesByOccupancy):
    """The lowest page with a free block, which is where the lowest free block lies."""

    def fullest(self) -> int:
        lowest = [pages & -pages for pages in self._pages_at.values()]
        return min(lowest).bit_length() - 1


class LastPageFirst(PagesByOccupancy):
    """The page touched last of those in use; a wholly free one only when there is no other."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages)
        self._touched: dict[int, None] = {}  # of those with free blocks, oldest first

    def put(self, page: int, level: int) -> None:
        super().put(page, level)
        self._touched.pop(page, None)
        if level > 0:
            self._touched[page] = None

    def fullest(self) -> int:
        return next(reversed(self._touched)) if self._touched else super().fullest()


METHODS: dict[str, type[PagesByOccupancy]] = {
    "ours": PagesByOccupancy,
    "ours_unmoved": PagesByOccupancy,
    "first_fit": FirstFit,
    "last_page_first": LastPageFirst,
}


class Lender:
    """As many pages as are asked for, lowest number first."""

    def __init__(self, pages: int) -> None:
        self._away = list(range(pages))  # a heap

    def room(self) -> int:
        return len(self._away)

    def acquire(self, count: int, *, urgent: bool) -> list[int]:
        return [heapq.heappop(self._away) for _ in range(min(count, len(self._away)))]

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            heapq.heappush(self._away, page)


def pool_of(method: str, per_page: int, pages: int) -> BlockPool:
    pool = BlockPool(pages * per_page, blocks_per_page=per_page, source=Lender(pages))
    pool._by_occupancy = METHODS[method](pages)
    return pool


# Traffic


@dataclass(slots=True)
class Turn:
    """One model call: so many tokens are new in its prompt, and so many are generated."""

    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Live:
    trajectory: int
    tokens: int
    left: int
    blocks: list[int]


@dataclass(slots=True)
class Measured:
    """What a run showed: pages step by step, prefix hits, reclaims, and how long calls of the pool took."""

    held: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    hits: int = 0
    looked_for: int = 0
    wanted_back: int = 0
    got_back: int = 0
    dropped: int = 0
    moved: int = 0
    lost: int = 0
    computed: int = 0
    calls: int = 0
    seconds: float = 0.0

    def sample(self, pool: BlockPool) -> None:
        if pool.used:
            self.held.append(pool.pages_pinned)
            self.needed.append(-(-pool.used // pool.blocks_per_page))

    def row(self) -> dict[str, Any]:
        ratios = sorted(held / needed for held, needed in zip(self.held, self.needed, strict=True))
        return {
            "held_over_needed": round(sum(self.held) / sum(self.needed), 3),
            "held_over_needed_p95": round(ratios[int(0.95 * len(ratios))], 3),
            "pages_needed": round(sum(self.needed) / len(self.needed), 1),
            "hit_rate": round(self.hits / self.looked_for, 3) if self.looked_for else None,
            "got_back": round(self.got_back / self.wanted_back, 3) if self.wanted_back else None,
            "dropped_per_page": round(self.dropped / self.got_back, 1) if self.got_back else None,
            "moved_per_page": round(self.moved / self.got_back, 1) if self.moved else None,
            "lost_share": round(self.lost / self.computed, 3) if self.computed else None,
            "us_per_call": round(self.seconds / self.calls * 1e6, 2),
        }


class Traffic:
    """Requests on one pool: what every kind of traffic does the same way."""

    def __init__(self, pool: BlockPool, method: str, seed: int) -> None:
        self.pool = pool
        self.method = method
        self.rng = random.Random(seed)
        self.running: list[Live] = []
        self.measured = Measured()
        self.step_number = 0

    def run(self, steps: int) -> Measured:
        for self.step_number in range(steps):
            self.arrive()
            for live in list(self.running):
                self._decode(live)
            if self.step_number >= WARM_UP_STEPS:
                self.measured.sample(self.pool)
                if self.step_number % RECLAIM_STEPS == 0:
                    self._reclaim()
        self.pool.check()
        return self.measured

    def arrive(self) -> None:
        """Start what arrives in this step."""

    def finish(self, live: Live) -> None:
        self._timed(lambda: self.pool.release(live.blocks))

    def start(self, trajectory: int, tokens: int, output_tokens: int, found: list[int]) -> bool:
        """False if there is no room for its prompt now."""
        for block in found:
            self.pool.take(block)
        fresh = self._timed(lambda: self.pool.allocate(-(-tokens // BLOCK_TOKENS) - len(found)))
        if fresh is None:
            self.pool.release(found)
            return False
        self.running.append(Live(trajectory, tokens, output_tokens, found + fresh))
        return True

    def _decode(self, live: Live) -> None:
        live.left -= 1
        if live.tokens == len(live.blocks) * BLOCK_TOKENS:
            fresh = self._timed(lambda: self.pool.allocate(1))
            if fresh is None:  # cut short: the pool is full of running requests
                live.left, live.tokens = 0, live.tokens - 1
            live.blocks += fresh or []
        live.tokens += 1
        if live.left <= 0:
            self.running.remove(live)
            self.finish(live)

    def _reclaim(self) -> None:
        """A quarter of the pages, at the cost of the cache and of no request."""
        pool, cached = self.pool, self.pool.cached
        pages = int(pool.pages_held * RECLAIM_SHARE)
        if self.method == "ours":
            moves = pool.gather(pages, MOVED_BYTES_MAX * pool.blocks_per_page // PAGE_BYTES)
            for live in self.running:
                live.blocks = [moves.get(block, block) for block in live.blocks]
            self.measured.moved += len(moves)
        elif self.method != "ours_unmoved":
            while len(pool._by_occupancy.highest_at(0, pages)) < pages and pool.cached:
                pool._drop_oldest(1)
        got_back = pool.shrink(pages)
        self.measured.wanted_back += pages
        self.measured.got_back += got_back
        self.measured.dropped += cached - pool.cached
        self.measured.lost += self._work_in_the_way(pages - got_back)
        self.measured.computed += sum(live.tokens for live in self.running)

    def _work_in_the_way(self, pages: int) -> int:
        """Of the requests that evicting would pick to have this many pages more; they stay, so that methods compare."""
        pool = self.pool
        holders = [Holder(str(number), live.tokens, tuple(live.blocks)) for number, live in enumerate(self.running)]
        gone = victims(holders, pool.blocks_per_page, pages)
        if self.method == "ours":  # whoever is left is moved, so all that counts is how many blocks fit
            gone = victims(holders, 1, max(0, pool.used - (pool.pages_held - pages) * pool.blocks_per_page))
        return sum(self.running[int(name)].tokens for name in gone)

    def _timed(self, action: Callable[[], Any]) -> Any:
        begin_s = time.perf_counter()
        result = action()
        self.measured.seconds += time.perf_counter() - begin_s
        self.measured.calls += 1
        return result


class Decode(Traffic):
    """Single requests. The tail of lengths is what a chat trace shows: a few live a hundred times as long as most."""

    def arrive(self) -> None:
        phase = math.sin(2 * math.pi * self.step_number / LOAD_PERIOD_STEPS)
        wanted = RUNNING_MIN + (RUNNING_MAX - RUNNING_MIN) * (0.5 + 0.5 * phase) ** 2
        if len(self.running) < wanted:
            prompt = min(int(self.rng.lognormvariate(4, 1)) + 1, CONTEXT_TOKENS // 2)
            output = min(int(self.rng.lognormvariate(4.5, 1.2)) + 1, CONTEXT_TOKENS // 2)
            self.start(0, prompt, output, [])


class Turns(Traffic):
    """A closed loop of trajectories; the blocks of a turn that ended stay findable for the next."""

    def __init__(self, pool: BlockPool, method: str, seed: int, trajectories: Iterator[list[Turn]]) -> None:
        super().__init__(pool, method, seed)
        self._source = trajectories
        self._turns: dict[int, deque[Turn]] = {}
        self._length: dict[int, int] = {}
        self._due: list[tuple[int, int]] = []
        for _ in range(RUNNING_MAX):
            self._begin()

    def arrive(self) -> None:
        ready = [entry for entry in self._due if entry[0] <= self.step_number]
        self._due = [entry for entry in self._due if entry[0] > self.step_number]
        for _, trajectory in ready:
            turn = self._turns[trajectory].popleft()
            tokens = min(self._length[trajectory] + turn.prompt_tokens, CONTEXT_TOKENS)
            found = self._prefix(trajectory, (tokens - 1) // BLOCK_TOKENS)
            if not self.start(trajectory, tokens, turn.output_tokens, found):
                self._turns[trajectory].appendleft(turn)
                self._due.append((self.step_number + 1, trajectory))

    def finish(self, live: Live) -> None:
        full = live.tokens // BLOCK_TOKENS
        for block, digest in zip(live.blocks, self._digests(live.trajectory, full), strict=False):
            self.pool.publish(block, digest)
        super().finish(live)
        self._length[live.trajectory] = live.tokens
        if self._turns[live.trajectory] and live.tokens < CONTEXT_TOKENS // 2:
            self._due.append((self.step_number + self.rng.randint(*PAUSE_STEPS), live.trajectory))
        else:
            self._begin()

    def _begin(self) -> None:
        name = len(self._turns)
        self._turns[name], self._length[name] = deque(next(self._source)), 0
        self._due.append((self.step_number + self.rng.randint(*PAUSE_STEPS), name))

    def _prefix(self, trajectory: int, blocks: int) -> list[int]:
        found = []
        for digest in self._digests(trajectory, blocks):
            block = self.pool.find(digest)
            if block is None:
                break
            found.append(block)
        if self._length[trajectory]:
            self.measured.looked_for += min(blocks, self._length[trajectory] // BLOCK_TOKENS)
            self.measured.hits += len(found)
        return found

    def _digests(self, trajectory: int, blocks: int) -> list[bytes]:
        root = root_digest("", str(trajectory))
        return [block_digest(root, [index]) for index in range(blocks)]


def made_up(seed: int) -> Iterator[list[Turn]]:
    """The rollouts of the co-serving benchmark: 10 turns of 24 new prompt and 8 to 32 generated tokens."""
    rng = random.Random(seed)
    while True:
        yield [Turn(24, rng.randint(8, 32)) for _ in range(10)]


def recorded(path: Path, seed: int) -> Iterator[list[Turn]]:
    """Trajectories of a file, in a seeded order, over and over."""
    found = list(_read(path).values())
    rng = random.Random(seed)
    while True:
        yield from rng.sample(found, len(found))


def _read(path: Path) -> dict[str, list[Turn]]:
    """Tokens where the file has them, else four characters a token; a new prompt is what was observed last."""
    trajectories: dict[str, list[Turn]] = {}
    observed: dict[str, int] = {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for row in csv.DictReader(lines):
            name = row["traj"]
            first = _tokens(row, "prompt") or 64
            prompt = observed.get(name, min(first, CONTEXT_TOKENS // 4))
            turn = Turn(max(1, min(prompt, 1024)), max(1, min(_tokens(row, "output") or _tokens(row, "out"), 1024)))
            trajectories.setdefault(name, []).append(turn)
            observed[name] = _tokens(row, "obs") or 64
    return trajectories


def _tokens(row: dict[str, str], name: str) -> int:
    if row.get(f"{name}_tokens"):
        return int(float(row[f"{name}_tokens"]))
    return int(float(row.get(f"{name}_chars") or 0)) // 4


def traffic_of(case: str, pool: BlockPool, method: str, arguments: Any) -> Traffic:
    if case == "decode":
        return Decode(pool, method, arguments.seed)
    seed = arguments.seed
    return Turns(pool, method, seed, made_up(seed) if case == "turns" else recorded(arguments.trajectories, seed))


def measure_holding(arguments: Any) -> list[dict[str, Any]]:
    cases = ["decode", "turns"] + (["recorded turns"] if arguments.trajectories else [])
    rows = []
    for case in cases:
        for model, per_page in PER_PAGE.items():
            for method in METHODS:
                print(f"\r{case}, {model}, {method}".ljust(60), end="", flush=True)
                pool = pool_of(method, per_page, POOL_BLOCKS[case] // per_page)
                measured = traffic_of(case, pool, method, arguments).run(arguments.steps)
                name = {"case": case, "model": model, "blocks_per_page": per_page, "method": method}
                rows.append({**name, **measured.row()})
    print("\r".ljust(60))
    return rows


def bars(cost: list[dict[str, Any]], holding: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_case = {row["case"]: row for row in cost}
    found = [
        harness.wanted(f"growing over {case} (1 GiB, touched)", by_case[case]["grow_over_this"], 3.0)
        for case in ("hand_over", "hand_over_scattered")
    ]
    ours = [row for row in holding if row["method"] == "ours" and row["case"] == "decode"]
    slowest_us = max(row["us_per_call"] for row in ours)
    return [*found, harness.wanted("us per call of the block pool, decode", slowest_us, 50.0, at_most=True)]


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=None, help="repeats of the memory costs (9, or 3 with --quick)")
    parser.add_argument("--steps", type=int, default=None, help="steps of traffic (20,000, or 4,000 with --quick)")
    parser.add_argument("--trajectories", type=Path, metavar="FILE", help="recorded turn lengths")
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (3 if arguments.quick else 9)
    arguments.steps = arguments.steps or (4_000 if arguments.quick else 20_000)
    if arguments.trajectories is None and "ROSE_DATA" in os.environ:
        arguments.trajectories = Path(os.environ["ROSE_DATA"]) / "trajectories" / "taubench_airline_gpt4o.csv.gz"
    begun, cost = harness.machine(), measure_cost(arguments)
    harness.print_table(cost, COST_COLUMNS)
    print()
    holding = measure_holding(arguments)
    harness.print_table(holding, HOLD_COLUMNS)
    return harness.finish(arguments, "pages", cost + holding, bars(cost, holding), begun)


if __name__ == "__main__":
    raise SystemExit(main())
