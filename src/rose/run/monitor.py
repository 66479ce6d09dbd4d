"""Samples of the pool and of the processes about once a second: turns by pool, and processor time by role.

Turns are counted by the kind of worker that ended them. A worker that was restarted counts from 0 again; its earlier
count is kept here. The gateway reports how devices were borrowed and given back, cycle by cycle; a cycle is recorded
whenever there is news of it, and the newest record of a number counts. The kernel counts the processor time
of every process; an agent lives in the front of its device, so on a lent device the rollouts' front is the agent, and
on a dedicated one the only front is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.client import GatewayClient
from rose.errors import RoseError
from rose.run.process_specs import BORROWED, DEDICATED, GATEWAY, LENDER, TRAFFIC
from rose.run.run_records import AllocationRecord, ClosedRecord, RunRecord

EVERY_S = 1.0
CYCLE_KEYS = AllocationRecord.__struct_fields__
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
ROLLOUT_FRONT = "rose.device.rollout_front"
ENGINE_ROLE = {BORROWED: "engine_borrowed", LENDER: "engine_borrowed", DEDICATED: "engine_dedicated"}
FRONT_ROLE = {
    BORROWED: "serving_front",
    LENDER: "agent_borrowed",
    DEDICATED: "agent_dedicated",
    GATEWAY: "gateway",
    TRAFFIC: "traffic",
}


@dataclass(frozen=True, slots=True)
class PoolSample:
    """Turns ended so far and turns under way at one moment, by the kind of worker."""

    at_s: float
    turns: dict[str, int]
    running: dict[str, int]
    version: str | None


class TurnCount:
    """Turns ended by each kind, over restarts of its workers."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._totals: dict[str, int] = {"dedicated": 0, "borrowed": 0}

    def observe(self, members: list[dict[str, Any]]) -> dict[str, int]:
        for member in members:
            name, ended = member["name"], member["turns_ended"]
            before = self._last.get(name, 0)
            self._totals[member["kind"]] += ended - before if ended >= before else ended
            self._last[name] = ended
        return dict(self._totals)


@dataclass(slots=True)
class PoolWatch:
    """Watch on the pool: `look` returns exact counts, and `watch` looks about once a second."""

    client: GatewayClient
    on_sample: Callable[[PoolSample], None]
    record: Callable[[RunRecord], None] = lambda record: None
    say: Callable[[str], None] = lambda line: None
    turns: TurnCount = field(default_factory=TurnCount)
    last: PoolSample | None = None
    counts: dict[str, int] = field(default_factory=dict)  # of the gateway's scheduler
    cycles: dict[int, dict[str, Any]] = field(default_factory=dict)  # of borrowing, by number
    closed: dict[str, str] = field(default_factory=dict)  # workers that take no turns by themselves, and why

    async def look(self) -> PoolSample:
        shown = await self.client.pool()
        running: dict[str, int] = {"dedicated": 0, "borrowed": 0}
        for member in shown["members"]:
            running[member["kind"]] += member["turns"]
            self._tell_closed(member)
        self.counts = shown["counts"]
        self.last = PoolSample(time.monotonic(), self.turns.observe(shown["members"]), running, shown["version"])
        self.on_sample(self.last)
        for cycle in shown.get("allocation", ()):
            if self.cycles.get(cycle["number"]) != cycle:
                self.cycles[cycle["number"]] = cycle
                self.record(AllocationRecord(**{key: cycle[key] for key in CYCLE_KEYS if key in cycle}))
        return self.last

    def _tell_closed(self, member: dict[str, Any]) -> None:
        """Report a closed worker once for every time that it closes."""
        name, why = member["name"], member["trouble"] if member["state"] == "closed" else ""
        if why and name not in self.closed:
            self.say(f"worker {name} takes no turns for a while: {why}")
            self.record(ClosedRecord(at_s=time.monotonic(), worker=name, why=why))
        if why:
            self.closed[name] = why
        else:
            self.closed.pop(name, None)

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(RoseError):  # the rollouts that play through it raise it too
                await self.look()
            await asyncio.sleep(EVERY_S)


class ProcessorTime:
    """Seconds of processor time by role, since the start; processes that died keep what they had."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], float] = {}

    def observe(self, process_ids: Mapping[str, int]) -> dict[str, float]:
        """Return the processor time by role, given every process by the role it was started in."""
        for role, process_id in process_ids.items():
            for member in family(process_id):
                with contextlib.suppress(OSError):
                    self._known[(member, _role(role, process_id, member))] = cpu_s(member)
        totals: dict[str, float] = {}
        for (_, role), seconds in self._known.items():
            totals[role] = totals.get(role, 0.0) + seconds
        return totals


def family(process_id: int) -> list[int]:
    """Return a process and all its descendants that still run."""
    found = [process_id]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{process_id}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def cpu_s(process_id: int) -> float:
    """Return the user and system time of a process, all threads."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _role(started_as: str, process_id: int, member: int) -> str:
    if member == process_id:
        return FRONT_ROLE.get(started_as, started_as)
    with contextlib.suppress(OSError):
        if ROLLOUT_FRONT.encode() in Path(f"/proc/{member}/cmdline").read_bytes():
            return f"agent_{started_as}"
    return ENGINE_ROLE.get(started_as, started_as)
