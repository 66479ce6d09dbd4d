"""How large the gateway's ledger gets, and how long a restart takes.

`never pauses`: a gateway in this process, 32 trajectories at once whose turns follow each other without a pause, as in
an asynchronous job; the worker answers at once. The ledger's files (database, write-ahead log) are measured every tenth
of a second while it runs.

`weeks`: the gateway's core in virtual time, a million trajectories of two turns in groups of eight, batches taken as
they are complete. At the end the gateway is killed with a thousand trajectories open and a turn of 2,000 tokens under
way in each; `restart_s` is until the next life has read everything and placed its turns.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

from rose.api.worker_messages import Heartbeat, Join, TokensAdded, Turn, TurnTokens
from rose.config.server_settings import GatewaySettings
from rose.engines.base import Sampling
from rose.engines.token_stream import TokenStream
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.gateway_server import build_gateway
from rose.gateway.ledger import Ledger
from rose.gateway.ledger_file import LOG_BYTES
from rose.gateway.sessions import Finish
from rose.models.model_folder import load_model_folder
from rose.models.presets import write_preset

COLUMNS = ("case", "trajectories", "turns", "seconds", "turns_s", "log_mb_max", "files_mb_max", "files_mb", "restart_s")
GROUP, BATCH_GROUPS = 8, 16
AT_ONCE = 32
OPEN, OPEN_TOKENS = 1000, 2000
SAMPLING = Sampling(max_tokens=8)
ANSWER = (5, 6, 7, 8)
LOGPROBS = (-0.1, -0.2, -0.3, -0.4)
MB = 1 << 20


class Worker:
    """Takes every turn and answers it when asked to."""

    def __init__(self, core: GatewayCore, model: str, now_s: float) -> None:
        self.turns: list[Turn] = []
        self._core = core
        self.member = core.join(Join("w", "dedicated", model, "0", 4096, 1 << 30, 1 << 20), self._hear, now_s)

    def answer(self, now_s: float) -> None:
        turns, self.turns = self.turns, []
        for turn in turns:
            piece = TurnTokens(turn.attempt_id, ANSWER, LOGPROBS, "0", "stop", 0)
            self._core.receive(self.member, TokensAdded((piece,)), now_s)

    def beat(self, now_s: float) -> None:
        self._core.receive(self.member, Heartbeat(0, 0, 0, 1 << 30, "0", True), now_s)

    def _hear(self, message: Any) -> None:
        if isinstance(message, Turn):
            self.turns.append(message)


class Sizes:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.log_max = self.files_max = 0

    def look(self) -> int:
        sizes = {name: os.path.getsize(name) for name in (str(self.path), f"{self.path}-wal") if os.path.exists(name)}
        self.log_max = max(self.log_max, sizes.get(f"{self.path}-wal", 0))
        self.files_max = max(self.files_max, sum(sizes.values()))
        return sum(sizes.values())


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--turns", type=int, default=100_000, help="of the job that never pauses (100000)")
    options.add_argument("--trajectories", type=int, default=1_000_000, help="of the weeks (1000000)")
    arguments = options.parse_args()
    begun = harness.machine()
    turns, trajectories = (5000, 20_000) if arguments.quick else (arguments.turns, arguments.trajectories)
    with tempfile.TemporaryDirectory() as place:
        rows = [asyncio.run(_never_pauses(Path(place), turns)), _weeks(Path(place) / "weeks.ledger", trajectories)]
    harness.print_table(rows, COLUMNS)
    bars = [
        harness.wanted("files_mb_max, never pauses", rows[0]["files_mb_max"], 64, at_most=True),
        harness.wanted("files_mb_max, weeks", rows[1]["files_mb_max"], 64, at_most=True),
        harness.wanted("restart_s", rows[1]["restart_s"], 10, at_most=True),
    ]
    return harness.finish(arguments, "ledger", rows, bars, begun)


async def _never_pauses(place: Path, turns: int) -> dict[str, Any]:
    path = place / "job.ledger"
    folder = load_model_folder(write_preset("frozenlake-1m", place / "model", seed=0))
    gateway = build_gateway(folder, GatewaySettings(ledger=str(path)))
    worker, sizes = Worker(gateway.core, gateway.context.model_name, gateway.now_s()), Sizes(path)
    numbers = iter(range(turns // 4))
    batches = asyncio.create_task(_take_batches(gateway.core))
    works = [gateway.tick_for_ever(), _look(sizes), _answer(worker, gateway.now_s)]
    tasks = [batches, *(asyncio.create_task(work) for work in works)]
    began_s = time.monotonic()
    await asyncio.gather(*(_play(gateway.core, numbers) for _ in range(AT_ONCE)))
    seconds = time.monotonic() - began_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    row = _row("never pauses", turns // 4, turns, seconds, sizes)
    gateway.core.ledger.close()
    return row


async def _play(core: GatewayCore, numbers: Iterator[int]) -> None:
    """Trajectories of four turns, one after the other."""
    for number in numbers:
        name = f"run/{number // GROUP}/{number % GROUP}"
        core.trajectories.begin(name, time.monotonic(), group=f"run/{number // GROUP}", group_size=GROUP)
        ids: tuple[int, ...] = (number % 50, 1, 2, 3)
        for _ in range(4):
            reader = TokenStream()
            core.ask(name, ids, SAMPLING, reader, time.monotonic())
            events = await reader.take(ends=1)
            ids = (*ids, *(token_id for event in events for token_id in event.token_ids), 9)
        core.finish(name, Finish(1.0, True), time.monotonic())


async def _answer(worker: Worker, now_s: Any) -> None:
    while True:
        worker.answer(now_s())
        worker.beat(now_s())
        await asyncio.sleep(0.002)


async def _take_batches(core: GatewayCore) -> None:
    after = 0
    while True:
        await asyncio.sleep(0.05)
        while core.trajectories.batch(BATCH_GROUPS, after) is not None:
            after += 1


async def _look(sizes: Sizes) -> None:
    while True:
        sizes.look()
        await asyncio.sleep(0.1)


def _weeks(path: Path, trajectories: int) -> dict[str, Any]:
    ledger = Ledger(path, "model")
    core, sizes = GatewayCore("model", GatewaySettings(), ledger), Sizes(path)
    worker, now_s = Worker(core, "model", 0.0), 0.0
    began_s = time.monotonic()
    for after, first in enumerate(range(0, trajectories, GROUP * BATCH_GROUPS)):
        now_s += 0.2
        names = range(first, first + GROUP * BATCH_GROUPS)
        for number in names:
            core.trajectories.begin(f"run/{number}", now_s, group=f"run/{number // GROUP}", group_size=GROUP)
        for turn in range(2):
            for number in names:
                ids = (number % 50, 1, 2, 3) if turn == 0 else (number % 50, 1, 2, 3, *ANSWER, 9)
                core.ask(f"run/{number}", ids, SAMPLING, TokenStream(), now_s)
            worker.answer(now_s)
            core.ledger.commit()
        for number in names:
            core.finish(f"run/{number}", Finish(1.0, True), now_s)
        assert core.trajectories.batch(BATCH_GROUPS, after) is not None
        worker.beat(now_s)
        core.tick(now_s)
        if ledger.log_bytes > LOG_BYTES:
            ledger.checkpoint()
            ledger.shorten()
        if after % 100 == 0:
            sizes.look()
            print(f"\r{first:,} of {trajectories:,} trajectories", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    seconds = time.monotonic() - began_s
    for number in range(OPEN):
        core.trajectories.begin(f"open/{number}", now_s, group=f"open/{number // GROUP}", group_size=GROUP)
        core.ask(f"open/{number}", tuple(range(OPEN_TOKENS)), SAMPLING, TokenStream(), now_s)
    core.ledger.commit()
    row = _row("weeks", trajectories, 2 * trajectories, seconds, sizes)
    ledger.abandon()
    began_s = time.monotonic()
    ledger = Ledger(path, "model")
    core = GatewayCore("model", GatewaySettings(), ledger)
    core.ledger.commit()
    row["restart_s"] = round(time.monotonic() - began_s, 2)
    assert core.scheduler.waiting == OPEN, core.scheduler.waiting
    ledger.close()
    return row


def _row(case: str, trajectories: int, turns: int, seconds: float, sizes: Sizes) -> dict[str, Any]:
    left = sizes.look()
    return {
        "case": case,
        "trajectories": trajectories,
        "turns": turns,
        "seconds": round(seconds, 1),
        "turns_s": round(turns / seconds),
        "log_mb_max": round(sizes.log_max / MB, 1),
        "files_mb_max": round(sizes.files_max / MB, 1),
        "files_mb": round(left / MB, 1),
        "restart_s": None,
    }


if __name__ == "__main__":
    sys.exit(main())
