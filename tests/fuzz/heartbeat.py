"""Measures how long an event loop was blocked by its own process.

A callback runs in the loop every `BEAT_S`. A beat that comes late is a gap. The machine may be the cause: another
process had the core. So a gap counts as a block only for the part that this process caused:

- CPU time that the loop's own thread used during the gap (a long callback), or
- time in which the loop's thread slept (a lock, a blocking call), seen by a watchdog thread, or
- CPU time of the whole process, if the watchdog could not run either (another thread held the interpreter lock).

A loop thread that is runnable but gets no core uses no CPU and does not sleep: that gap is not counted.

The watchdog also keeps the stack of the loop's thread, and writes one JSON line per block and one line per second with
the number of tasks and of memory blocks that Python objects hold. Without a file, blocks of the loop are kept in
`self.blocks`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

BEAT_S = 0.010
WATCH_S = 0.005
LATE_MAX = 2  # a watchdog that comes later got no core itself
SHOWN_S = 1.0  # between two lines with the numbers of tasks and live memory blocks
FRAMES_MAX = 12  # of a stack that is written down
VARIABLE = "ROSE_TEST_HEARTBEATS"  # folder for one file per process; read by site/sitecustomize.py
BLOCK_VARIABLE = "ROSE_TEST_BLOCK_MS"
BLOCK_MS = 50.0


@dataclass(frozen=True)
class Block:
    """One gap of the loop that its own process caused. Moments are on the monotonic clock of the machine."""

    pid: int
    began_s: float
    gap_ms: float
    blocked_ms: float
    own_cpu_ms: float
    asleep_ms: float
    process_cpu_ms: float
    watchdog_late_ms: float
    stack: list[str] = field(default_factory=list)


class Heartbeat:
    """Beats in the running loop from construction until `close`."""

    def __init__(self, block_ms: float = BLOCK_MS, file: IO[str] | None = None) -> None:
        self.blocks: list[Block] = []
        self.beats = 0
        self._block_s = block_ms / 1e3
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._state = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        self._seen_s = self._watched_s = time.monotonic()
        self._own_s, self._process_s = time.thread_time(), time.process_time()
        self._asleep_s = self._late_s = 0.0
        self._stack: list[str] = []  # the deepest that was seen in this gap
        self._depth = 0
        self._shown_s = 0.0
        self._closed = threading.Event()
        self._timer = self._loop.call_later(BEAT_S, self._beat)
        self._watchdog = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._watchdog.start()

    def close(self) -> None:
        self._timer.cancel()
        self._closed.set()
        self._watchdog.join()

    def missed(self) -> int:
        """Return how many beats the loop missed because of its own process, counted in units of the block limit."""
        return sum(int(block.blocked_ms / 1e3 / self._block_s) for block in self.blocks)

    # In the loop

    def _beat(self) -> None:
        now_s, own_s, process_s = time.monotonic(), time.thread_time(), time.process_time()
        gap_s = now_s - self._seen_s - BEAT_S
        if gap_s >= self._block_s:
            self._judge(gap_s, own_s - self._own_s, process_s - self._process_s)
        self.beats += 1
        self._asleep_s = self._late_s = 0.0
        self._stack, self._depth = [], 0
        self._seen_s, self._own_s, self._process_s = now_s, own_s, process_s
        if self._file is not None and now_s - self._shown_s >= SHOWN_S:
            self._shown_s = now_s
            tasks, blocks = len(asyncio.all_tasks(self._loop)), sys.getallocatedblocks()
            self._write({"pid": os.getpid(), "at_s": now_s, "tasks": tasks, "live_blocks": blocks})
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _judge(self, gap_s: float, own_s: float, process_s: float) -> None:
        late_s = max(self._late_s, time.monotonic() - self._watched_s - WATCH_S)
        blocked_s = max(own_s, self._asleep_s, process_s if late_s >= self._block_s / 2 else 0.0)
        blocked_s = min(gap_s, blocked_s)
        if blocked_s < self._block_s:
            return
        numbers = (gap_s, blocked_s, own_s, self._asleep_s, process_s, late_s)
        block = Block(os.getpid(), self._seen_s, *(round(1e3 * number, 1) for number in numbers), self._stack)
        self.blocks.append(block)
        if self._file is not None:
            self._write({"block": asdict(block)})

    def _write(self, line: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    # In the watchdog's thread

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            now_s = time.monotonic()
            since_s = now_s - self._watched_s
            self._late_s = max(self._late_s, since_s - WATCH_S)
            self._watched_s = now_s
            if now_s - self._seen_s - BEAT_S < self._block_s / 4:
                continue
            if self._is_asleep():
                self._asleep_s += min(since_s, LATE_MAX * WATCH_S)  # the rest was not observed
            self._keep_stack()

    def _keep_stack(self) -> None:
        """Keep the loop's stack as text. A frame that outlived this call would hold the request that it works on."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is not None and (depth := _depth(frame)) >= self._depth:
            self._depth = depth
            self._stack = [line.strip() for line in traceback.format_stack(frame)[-FRAMES_MAX:]]

    def _is_asleep(self) -> bool:
        try:
            return self._state.read_text().rpartition(")")[2].split()[0] in ("S", "D")
        except OSError:
            return False


def _depth(frame: FrameType | None) -> int:
    count = 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def install(folder: Path, block_ms: float) -> None:
    """Make every loop that `asyncio.Runner` runs in this process write its blocks to a file in this folder."""
    run = asyncio.Runner.run

    def watched(self: asyncio.Runner, coro: object, **options: object) -> object:
        def begin() -> None:
            file = open(folder / f"{os.getpid()}.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (as long as the loop)
            Heartbeat(block_ms, file)

        self.get_loop().call_soon(begin)
        return run(self, coro, **options)  # type: ignore[arg-type]

    asyncio.Runner.run = watched  # type: ignore[assignment,method-assign]
