"""Runs cases against one listener for a while, beside an honest client, and says what did not hold.

Checked: answers (no 5xx but a stated 503, no hang), processes (none ended or restarted), logs (no traceback), memory
(as much at rest after half of the run as at its end, and as many live objects), file descriptors, tasks and threads
(none left when all clients have gone), event loops (no block over the limit), the honest client (each answer right).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.heartbeat import Block
from tests.fuzz.servers import Server, Usage
from tests.fuzz.steps import Reply, Step, play

CLIENTS = 4
SETTLE_S = 20.0  # for what clients left behind to end
MEMORY_SHARE = 0.05
MEMORY_FLOOR_MB = 20.0  # the largest answers, with the scores of a long prompt, and the arenas that they leave
LIVE_SHARE = 0.10  # more live blocks; the gateway remembers the last 10,000 outcomes, about 9 blocks each
ENGINE_MORE_MB = 64.0  # an engine touches its KV memory little by little
DESCRIPTORS_MORE, TASKS_MORE, THREADS_MORE = 2, 2, 8  # threads: a pool that grows to its size stays there
WARM_SHARE = 0.5  # until a request as large as any has come: it decides how many arenas there are
START_S, START_QUIET = 60.0, 2  # at most; looks in a row that found no change
REST_S = 4.0  # without a client: servers return the memory of large requests a second after them
BLOCKS_TRACED = 4  # blocks whose request is looked for
SUSPECTS_MAX = 6
FINDINGS_MAX = 40
TRACED_S = 2.0  # a 500 so soon after a traceback is told by it
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?:.*\n)?")
_PLACE = re.compile(r'File "[^"]*/(src/rose/[^"]+)", line \d+, in (\S+)')


@dataclass(frozen=True)
class Finding:
    """Something that did not hold; `signature` is the same for the same defect."""

    signature: str
    detail: str
    steps: tuple[Step, ...] = ()
    number: int | None = None  # of the case

    @property
    def name(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.signature.lower()).strip("-")[:80]


Play = Callable[[random.Random, Server], Awaitable[Sequence[tuple[Step, Reply]]]]
Honest = Callable[[Server], Awaitable[str | None]]


@dataclass(frozen=True)
class Listener:
    """What is fuzzed: a server, how cases are played, and what an honest client does. It returns what is wrong."""

    name: str
    server: Callable[[Path, float], AbstractContextManager[Server]]
    port: str
    case: Callable[[random.Random], Sequence[Step]] | None
    honest: Honest
    play: Play | None = None  # instead of `case`, for what is not HTTP


@dataclass
class Run:
    """One run against one listener."""

    listener: Listener
    server: Server
    seed: str
    seconds: float
    findings: dict[str, Finding] = field(default_factory=dict)
    cases: int = 0
    honest: int = 0
    honest_slowest_s: float = 0.0
    requests: int = 0
    warm_mb: dict[str, int] = field(default_factory=dict)
    warm_blocks: dict[int, int] = field(default_factory=dict)  # live, by process
    _numbers: Iterator[int] = field(default_factory=itertools.count)  # of cases
    _traced_s: float = 0.0  # when the last traceback was seen
    _log_read: dict[Path, int] = field(default_factory=dict)
    _active: list[tuple[float, float, int, Sequence[Step]]] = field(default_factory=list)

    def note(self, finding: Finding) -> None:
        if len(self.findings) < FINDINGS_MAX:
            self.findings.setdefault(finding.signature, finding)

    async def whole(self) -> None:
        problem = await self.listener.honest(self.server)
        assert problem is None, f"before the first case: {problem}"
        await self._started()
        before, pids, tasks = self.server.usage(), self.server.pids(), self.server.tasks()
        await self._fuzz(self.seconds * WARM_SHARE)
        await asyncio.sleep(REST_S)
        warm, self.warm_blocks = self.server.usage(), self.server.live_blocks()
        self.warm_mb = {_name_of(pid): round(usage.rss_mb) for pid, usage in warm.items()}
        await self._fuzz(self.seconds * (1 - WARM_SHARE))
        await asyncio.sleep(REST_S)
        self.check_processes(pids)
        self.check_live_blocks()
        await self._check_left_behind(before, warm, tasks)
        self.check_log(None, ())
        await self._check_blocks()
        problem = await self.honest_again()
        if problem is not None:
            self.note(Finding(f"honest client afterwards: {problem[:60]}", problem))

    async def _started(self) -> None:
        """Wait until no process opens descriptors, threads or tasks any more: one may still be starting."""
        deadline_s, held, quiet = time.monotonic() + START_S, self._held(), 0
        while quiet < START_QUIET and time.monotonic() < deadline_s:
            await asyncio.sleep(1.5)
            now = self._held()
            held, quiet = now, quiet + 1 if now == held else 0

    def _held(self) -> tuple[int, int, int]:
        usages = self.server.usage().values()
        return sum(one.descriptors for one in usages), sum(one.threads for one in usages), self.server.tasks()

    # Clients

    async def _fuzz(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        honest = asyncio.to_thread(lambda: asyncio.run(self._be_honest(until_s)))
        await asyncio.gather(honest, *(self._client(until_s) for _ in range(CLIENTS)))

    async def _client(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            number = next(self._numbers)
            await self.one(number)

    async def one(self, number: int) -> None:
        """Play the case with this number."""
        chance = random.Random(f"{self.seed}/{self.listener.name}/{number}")
        began_s = time.monotonic()
        played: list[tuple[Step, Reply]] = []
        if self.listener.play is not None:
            played += await self.listener.play(chance, self.server)
        else:
            assert self.listener.case is not None
            for step in self.listener.case(chance):
                played.append((step, await play(step, self.server.ports[self.listener.port])))
        steps = [step for step, _ in played]
        self._active.append((began_s, time.monotonic(), number, steps))
        del self._active[:-4000]
        self.cases += 1
        self.requests += len(played)
        for at, (_, reply) in enumerate(played):
            problem = reply.problem()
            if problem is not None:
                await self._answer_problem(problem, reply, steps[: at + 1], number)

    async def replay(self, steps: Sequence[Step]) -> None:
        """Play these steps, and note what did not hold."""
        for at, step in enumerate(steps):
            reply = await play(step, self.server.ports[self.listener.port])
            problem = reply.problem()
            if problem is not None:
                await self._answer_problem(problem, reply, steps[: at + 1], None)

    async def _answer_problem(self, problem: str, reply: Reply, steps: Sequence[Step], number: int | None) -> None:
        await asyncio.sleep(0.05)
        self.check_log(number, steps)
        if not problem.startswith("status 500") or time.monotonic() - self._traced_s > TRACED_S:
            route = re.sub(r"[?].*| HTTP/.*", "", steps[-1].name)
            detail = reply.body[:300].decode("utf-8", "replace")
            self.note(Finding(f"{problem}: {route}", detail, tuple(steps), number))

    async def _be_honest(self, until_s: float) -> None:
        """Runs in a thread with a loop of its own: making a large case holds up the loop of the other clients.

        A server that waits two seconds for a request would cut off an honest client that was held up for longer.
        """
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            problem = await self.listener.honest(self.server)
            self.honest_slowest_s = max(self.honest_slowest_s, time.monotonic() - began_s)
            self.honest += 1
            if problem is not None:
                self.note(Finding(f"honest client: {problem[:60]}", problem))
            await asyncio.sleep(0.2)

    async def honest_again(self) -> str | None:
        """Return what is still wrong when everybody else has left."""
        problem: str | None = None
        for _ in range(5):
            problem = await self.listener.honest(self.server)
            if problem is None:
                break
            await asyncio.sleep(1.0)
        return problem

    # Checks

    def check_log(self, number: int | None, steps: Sequence[Step]) -> None:
        """Note tracebacks that are new in the log."""
        found: list[str] = []
        for folder, text in self.server.logs().items():
            found += _TRACEBACK.findall(text[self._log_read.get(folder, 0) :])
            self._log_read[folder] = len(text)
        for trace in found:
            places = _PLACE.findall(trace)
            where = "{}:{}".format(*places[-1]) if places else "outside"
            error = trace.rstrip().rsplit("\n", 1)[-1].split(":")[0]
            self.note(Finding(f"traceback {error} in {where}", trace[-1500:], tuple(steps), number))
            self._traced_s = time.monotonic()

    def check_processes(self, before: dict[int, str]) -> None:
        now = self.server.pids()
        if now != before:
            gone, new = sorted(set(before) - set(now)), sorted(set(now) - set(before))
            logs = "\n".join(text[-1000:] for text in self.server.logs().values())
            self.note(Finding("processes ended or began", f"gone {gone}, new {new}\n{logs}"))

    def check_live_blocks(self) -> None:
        """Note each process with more live objects than after the warm-up: a leak that free memory may hide."""
        for pid, now in self.server.live_blocks().items():
            warm = self.warm_blocks.get(pid, now)
            if now > warm * (1 + LIVE_SHARE):
                self.note(Finding(f"live objects grew in {_name_of(pid)}", f"{warm} blocks warm, {now} after"))

    async def _check_left_behind(self, before: dict[int, Usage], warm: dict[int, Usage], tasks: int) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        while (problems := self._left_behind(before, warm, tasks)) and time.monotonic() < deadline_s:
            await asyncio.sleep(1.0)
        for problem in problems:
            self.note(problem)

    def _left_behind(self, before: dict[int, Usage], warm: dict[int, Usage], tasks: int) -> list[Finding]:
        found = []
        for pid, now in self.server.usage().items():
            if pid not in before or pid not in warm:
                continue
            name = _name_of(pid)
            if now.descriptors > before[pid].descriptors + DESCRIPTORS_MORE:
                detail = f"{before[pid].descriptors} before, {now.descriptors} after"
                found.append(Finding(f"file descriptors left in {name}", detail))
            if now.threads > before[pid].threads + THREADS_MORE:
                found.append(Finding(f"threads left in {name}", f"{before[pid].threads} before, {now.threads} after"))
            floor_mb = MEMORY_FLOOR_MB + (ENGINE_MORE_MB if "executor" in name else 0.0)
            limit_mb = warm[pid].rss_mb + max(floor_mb, MEMORY_SHARE * warm[pid].rss_mb)
            if now.rss_mb > limit_mb:
                detail = f"{before[pid].rss_mb:.0f} MB before, {warm[pid].rss_mb:.0f} warm, {now.rss_mb:.0f} after"
                found.append(Finding(f"memory grew in {name}", detail))
        if self.server.tasks() > tasks + TASKS_MORE:
            found.append(Finding("tasks left", f"{tasks} before, {self.server.tasks()} after"))
        return found

    async def _check_blocks(self) -> None:
        """Note each place that blocked a loop, with a request that does it again when it comes alone."""
        worst: dict[str, Block] = {}
        for block in self.server.blocks():
            place = _place_of(block)
            if place not in worst or block.blocked_ms > worst[place].blocked_ms:
                worst[place] = block
        for traced, (place, block) in enumerate(sorted(worst.items(), key=lambda item: -item[1].blocked_ms)):
            steps, number = await self._guilty(block) if traced < BLOCKS_TRACED else ((), None)
            detail = f"{block.blocked_ms:.0f} ms (own CPU {block.own_cpu_ms:.0f} ms)\n" + "\n".join(block.stack)
            self.note(Finding(f"loop blocked in {place}", detail, tuple(steps), number))

    async def _guilty(self, block: Block) -> tuple[Sequence[Step], int | None]:
        if self.listener.play is not None:
            return (), None
        end_s = block.began_s + block.gap_ms / 1e3
        there = [entry for entry in self._active if entry[0] <= end_s and entry[1] >= block.began_s]
        there.sort(key=lambda entry: -max((len(step.body) for step in entry[3]), default=0))
        for _, _, number, steps in there[:SUSPECTS_MAX]:
            known = len(self.server.blocks())
            for step in steps:
                await play(step, self.server.ports[self.listener.port])
            await asyncio.sleep(0.3)
            if len(self.server.blocks()) > known:
                return steps, number
        return (), None


def _place_of(block: Block) -> str:
    """Return the innermost function of ours on the stack, or the innermost one at all."""
    ours = [match for line in block.stack if (match := re.search(r'/(src/rose/[^"]+)", line \d+, in (\S+)', line))]
    if ours:
        return f"{ours[-1][1]}:{ours[-1][2]}"
    return block.stack[-1].split("\n")[0][-80:] if block.stack else "an unknown place"


def _name_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "a process"
    module, first = (*words[2:4], b"", b"")[:2]
    return f"{module.decode()} {first.decode()}" if module == b"rose" else module.decode()


def summary(run: Run) -> dict[str, Any]:
    return {
        "listener": run.listener.name,
        "seed": run.seed,
        "seconds": run.seconds,
        "cases": run.cases,
        "requests": run.requests,
        "honest": run.honest,
        "honest_slowest_s": round(run.honest_slowest_s, 2),
        "longest_block_ms": max((block.blocked_ms for block in run.server.blocks()), default=0.0),
        "rss_warm_mb": run.warm_mb,
        "rss_mb": {_name_of(pid): round(usage.rss_mb) for pid, usage in run.server.usage().items()},
        "live_blocks_warm": {_name_of(pid): blocks for pid, blocks in run.warm_blocks.items()},
        "live_blocks": {_name_of(pid): blocks for pid, blocks in run.server.live_blocks().items()},
        "findings": sorted(run.findings),
    }
