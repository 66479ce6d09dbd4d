"""What it costs to move pages of a KV pool between two processes, and whether deaths lose any.

Three parts, in pages of 2 MiB:

    cost      one process takes pages and gives them back, wiped both times: microseconds per page, for single pages and
              for all of the pool in one call. `cuda` is the same code on the stand-in for the driver (compiled by gcc):
              it shows what our side of the calls costs, and nothing about a GPU.
    hand-over a borrower holds 70 % of the pool and serving the rest; serving asks the borrower, over a socket, for 50 %
              of the pool and takes pages as they become free. Time from asking until serving has all.
    deaths    a borrower takes and gives back small pages at random until it is killed, or stopped and then killed, at a
              random moment, while serving takes and gives back too. Counted are pages that the kernel has in two
              processes, or twice in one (`doubled`), pages that are not free when their last owner is gone (`lost`),
              trials after which a page of serving's had changed (`overwritten`), and calls of serving's that were
              refused (`serving_refused`). `at_most` is the rate that so many trials exclude at 95 % confidence.

    python benchmarks/pool.py --json FILE
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness

from rose.device.kv_pool.exchange import create_pool, join_pool
from rose.device.kv_pool.host_memory import PAGE_BYTES
from rose.device.kv_pool.pool_share import PoolShare

sys.path.insert(0, str(harness.PROJECT))
from tests.support.cuda_standin.build import COMPILER, build_standin
from tests.support.pool_processes import Died, Nursery, PoolProcess

COST_PAGES, HAND_OVER_PAGES = 64, 512
DEATH_PAGES, DEATH_PAGE_BYTES = 24, 16 << 10
DELAY_S_MAX = 0.004  # until a death: a few calls of the borrower's
HAND_OVER_MS_MAX = 100.0
POLL_S = 0.0002  # a serving engine looks for free pages before every step
COLUMNS = (
    "part", "kind", "case", "n", "median", "p99", "low", "high", "unit", "trials", "doubled", "lost", "overwritten",
    "serving_refused", "at_most",
)  # fmt: skip


def figures(values: list[float]) -> dict[str, Any]:
    ordered = sorted(values)
    found = {
        "median": statistics.median(values), "p99": ordered[int(0.99 * len(ordered))], "low": ordered[0],
        "high": ordered[-1],
    }  # fmt: skip
    return {"n": len(values)} | {name: round(value, 2) for name, value in found.items()}


# Cost


def cost(kind: str, repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        ledger, backend, server = create_pool(Path(folder) / "pool", COST_PAGES, kind)
        share = PoolShare(ledger, backend, COST_PAGES)
        places = list(range(COST_PAGES))
        share.acquire(places)  # the first touch of memory is slower, and a pool's pages are touched once
        share.give_back(places)
        taken_us: dict[str, list[float]] = {}
        for _ in range(repeats):
            for place in places[::2]:
                timed(taken_us, "take, one page", 1, lambda place=place: share.acquire([place]))
            for place in places[::2]:
                timed(taken_us, "give back, one page", 1, lambda place=place: share.give_back([place]))
            timed(taken_us, "take, all at once", COST_PAGES, lambda: share.acquire(places))
            timed(taken_us, "give back, all at once", COST_PAGES, lambda: share.give_back(places))
        for one in (share, server, backend, ledger):
            one.close()
    head = {"part": "cost", "kind": kind, "unit": "us/page"}
    return [head | {"case": case} | figures(values) for case, values in taken_us.items()]


def timed(taken_us: dict[str, list[float]], case: str, pages: int, call: Any) -> None:
    begin_s = time.perf_counter()
    call()
    taken_us.setdefault(case, []).append((time.perf_counter() - begin_s) * 1e6 / pages)


# Hand-over


def lend(folder: Path, pages: int, asked: socket.socket) -> None:
    """Be the borrower: hold 70 % of the pool, and give back as many pages as a message asks for."""
    share = PoolShare(*join_pool(folder), pages)
    while True:
        missing = int(pages * 0.7) - share.held
        share.acquire([place for place in range(pages) if not share.has(place)][:missing])
        asked.send(str(share.held).encode())
        message = asked.recv(64)
        if not message:
            return
        share.give_back([place for place in range(pages) if share.has(place)][: int(message)])
        asked.send(b"given")
        asked.recv(64)


def hand_over(kind: str, pages: int, repeats: int) -> dict[str, Any]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "pool"
        borrower = os.fork()  # before a driver is loaded, which does not survive a fork
        if borrower == 0:
            ours.close()
            try:
                lend(folder, pages, theirs)
            finally:
                os._exit(0)  # a forked child must not clean up its parent's files
        theirs.close()
        ledger, backend, server = create_pool(folder, pages, kind)
        share = PoolShare(ledger, backend, pages)
        taken_ms = [ask(share, pages, ours) for _ in range(repeats + 1)][1:]  # memory is touched for the first time
        ours.close()
        os.waitpid(borrower, 0)
        for one in (share, server, backend, ledger):
            one.close()
    case = f"{pages // 2} of {pages} pages"
    return {"part": "hand-over", "kind": kind, "case": case, "unit": "ms"} | figures(taken_ms)


def ask(share: PoolShare, pages: int, borrower: socket.socket) -> float:
    """Return the milliseconds until half of the pool, more than before, is with serving."""
    held = int(borrower.recv(64))
    share.acquire(range(pages - held))
    assert share.free_pages() == 0 and held >= pages // 2, "the pool is not full"
    wanted = list(range(share.held, share.held + pages // 2))
    begin_s = time.perf_counter()
    borrower.send(str(pages // 2).encode())
    while wanted:
        got = share.acquire(wanted)
        wanted = wanted[len(got) :]
        if not got:
            time.sleep(POLL_S)
    taken_ms = (time.perf_counter() - begin_s) * 1000
    borrower.recv(64)
    share.give_back(range(share.held))
    borrower.send(b"again")
    return taken_ms


# Deaths


class Deaths:
    """One serving engine, and borrowers that die beside it."""

    def __init__(self, nursery: Nursery, folder: Path, seed: int) -> None:
        self.nursery, self.folder, self.chance = nursery, folder, random.Random(seed)
        self.serving = nursery.start()
        self.serving.call("create", str(folder), DEATH_PAGES, "memfd", DEATH_PAGE_BYTES, DEATH_PAGES)
        self.held: list[int] = []
        self.counts: Counter[str] = Counter()
        self.stopped_us: list[float] = []

    def one(self) -> None:
        """Let a borrower work, end it at some moment, and look at every page."""
        borrower = self.nursery.start()
        borrower.call("join", str(self.folder), DEATH_PAGES)
        borrower.begin("churn", self.chance.randrange(1 << 30))
        end_s = time.monotonic() + self.chance.random() * DELAY_S_MAX
        while time.monotonic() < end_s:
            self.serve()
        is_stopped = self.chance.random() < 0.5
        borrower.signal(signal.SIGSTOP if is_stopped else signal.SIGKILL)
        if is_stopped:
            self.look(borrower)
            begin_s = time.perf_counter()
            self.serve()
            self.stopped_us.append((time.perf_counter() - begin_s) * 1e6)
            self.look(borrower)
        borrower.kill()
        self.counts["lost"] += DEATH_PAGES - len(self.held) - self.serving.call("free_pages")
        self.look(None)
        self.counts["overwritten"] += not self.serving.call("is_filled_with", 7)

    def serve(self) -> None:
        """Let serving take or give back some pages, as a step does."""
        if self.held and self.chance.random() < 0.5:
            places = self.chance.sample(self.held, self.chance.randint(1, len(self.held)))
            answer = self.serving.call("give_back", places)
            self.held = [place for place in self.held if place not in places]
        else:
            places = [place for place in range(DEATH_PAGES) if place not in self.held]
            answer = self.serving.call("acquire_and_fill", places[: self.chance.randint(1, DEATH_PAGES)], 7)
            self.held += answer if isinstance(answer, list) else []
        self.counts["serving_refused"] += isinstance(answer, str)

    def look(self, borrower: PoolProcess | None) -> None:
        """Compare the kernel's tables of both processes, while the borrower does nothing."""
        ours = self.serving.mapped(DEATH_PAGE_BYTES)
        theirs = borrower.mapped(DEATH_PAGE_BYTES) if borrower else Counter[int]()
        self.counts["doubled"] += sum(count - 1 for count in (ours + theirs).values())
        self.counts["lost"] += len(ours) != len(self.held)


def deaths(trials: int, seed: int) -> dict[str, Any]:
    nursery = Nursery()
    with tempfile.TemporaryDirectory() as name:
        part = Deaths(nursery, Path(name) / "pool", seed)
        for number in range(trials):
            try:
                part.one()
            except Died:
                raise SystemExit(f"serving ended at trial {number}") from None
        part.serving.kill()
    nursery.close()
    zeros = dict.fromkeys(("doubled", "lost", "overwritten", "serving_refused"), 0)
    row = {"part": "deaths", "kind": "memfd", "case": "serving's call beside a stopped borrower", "unit": "us/call"}
    return (
        row
        | figures(part.stopped_us)
        | {"trials": trials}
        | zeros
        | part.counts
        | {"at_most": 1 - 0.05 ** (1 / trials)}
    )


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--kills", type=int, metavar="N", help="deaths of a borrower, by default 1000, quick 100")
    arguments = parser.parse_args()
    begun = harness.machine()
    quick = arguments.quick
    kinds = ["memfd"]
    with tempfile.TemporaryDirectory() as name:
        if COMPILER:
            os.environ["ROSE_CUDA_DRIVER"] = str(build_standin(Path(name)))
            os.environ["STANDIN_BYTES"] = str(HAND_OVER_PAGES * PAGE_BYTES)
            kinds.append("cuda")
        pages = HAND_OVER_PAGES // 4 if quick else HAND_OVER_PAGES
        rows = [hand_over(kind, pages, 5 if quick else 20) for kind in kinds]  # first: it forks
        rows += [row for kind in kinds for row in cost(kind, 5 if quick else 30)]
    rows.append(deaths(arguments.kills or (100 if quick else 1000), arguments.seed))
    harness.print_table(rows, COLUMNS)
    moved = [row for row in rows if row["part"] == "hand-over" and row["kind"] != "cuda"]
    bars = [
        harness.wanted(f"{row['kind']}: hand-over of {row['case']}, ms", row["median"], HAND_OVER_MS_MAX, at_most=True)
        for row in moved
    ]
    counted = json.dumps({name: rows[-1][name] for name in ("doubled", "lost", "overwritten", "serving_refused")})
    bad = sum(json.loads(counted).values())
    bars.append(harness.wanted(f"deaths: {counted}", bad, 0, at_most=True))
    return harness.finish(arguments, "pool", rows, bars, begun)


if __name__ == "__main__":
    raise SystemExit(main())
