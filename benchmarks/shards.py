"""What several gateways bring: turns per second with one and two, and how long a step takes with sixteen.

Live: two gateways with ledgers, each with a worker that computes nothing, and the client that makes them one. The same
trajectories are played through one gateway and through both, in turns. `turns_s` is what this machine did, where
gateways, workers and client share the cores. `turns_s_capacity` is turns per second of CPU of the busiest gateway:
what the gateways do when each has a core to itself. The targets are for the latter.

Virtual: the simulator plays one step on many devices with one gateway and with sixteen. Cores, ledgers, agents, the
client and the moves of devices are the real code; engines and network are simulated. `completion_ratio` is the time
with sixteen over the time with one, whose workers are all in one pool.

With `--devices N` only the virtual part runs, for 10 trajectories per device, and once more with a shard that is killed
in the middle of the step and started again. Its devices are coarse (`rose.sim.simulated_handle.CoarseDevice`): a token
takes 4 times as long, and up to 4 steps are one event. No device and no turn is left out.

    python benchmarks/shards.py --json FILE [--quick | --devices 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
from doors.processes import TOKENS, cpu_s, process, rose, stub

from rose.api.requests import TurnSampling
from rose.api.trajectories import BeginBody, FinishBody
from rose.core.shard_balance import BalanceRules
from rose.models.presets import write_preset
from rose.sharded_client import ShardedGatewayClient
from rose.sim.scenario import Scenario, random_scenario
from rose.sim.simulated_gateway import SimulatedGateway
from rose.sim.simulated_shards import SimulatedShards
from rose.sim.world import SETTLE_S, simulate

MODEL = "frozenlake-1m"
GROUP, TURNS, ANSWER_TOKENS, PROMPT_TOKENS, VOCABULARY = 2, 4, 16, 64, 100
SPEEDUP_MIN, COMPLETION_MAX = 1.8, 1.05
KILLED, KILLED_S, AWAY_S = 3, 5.0, 2.0  # which shard dies, when, and for how long
COLUMNS = (
    "case", "shards", "devices", "trajectories", "turns", "turns_s", "turns_s_capacity", "gateway_cpu_ms_per_turn",
    "busiest_share", "completion_s", "completion_ratio", "moved", "restarts", "cpu_s",
)  # fmt: skip


class SixteenShards(SimulatedShards):
    count = 16


class ManyDevices(SixteenShards):
    """Sixteen gateways whose devices are thousands: each shard may give away ten devices a second."""

    rules = BalanceRules(moves_per_minute=600)


class OneKilled(ManyDevices):
    """The same, and one shard is killed in the middle of the step, and started again."""

    def start(self) -> None:
        super().start()
        self._loop.call_later(KILLED_S, self.shards[KILLED].kill)
        self._loop.call_later(KILLED_S + AWAY_S, self.shards[KILLED].start)


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--devices", type=int, help="only in virtual time, with so many devices")
    arguments = parser.parse_args()
    begun = harness.machine()
    if arguments.devices is not None:
        return of_many_devices(arguments, begun)
    rows = [*live_rows(arguments), *virtual_rows(arguments)]
    harness.print_table(rows, COLUMNS)
    speedup, completion = rows[1]["speedup"], rows[-1]["completion_ratio"]
    bars = [
        harness.wanted("capacity of two gateways over one", speedup, SPEEDUP_MIN),
        harness.wanted("a step with 16 shards over one with one gateway", completion, COMPLETION_MAX, at_most=True),
    ]
    return harness.finish(arguments, "shards", rows, bars, begun, speedup=speedup, completion_ratio=completion)


def live_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        model = write_preset(MODEL, Path(place) / MODEL, seed=0)
        pids, urls = [], []
        for number in range(2):
            ledger = str(Path(place) / f"{number}.ledger")
            command = rose("gateway", str(model), "--port", "0", "--ledger", ledger)
            gateway, url = stack.enter_context(process(command, "ready at"))
            stack.enter_context(process(stub(url, MODEL, 1), "ready at"))
            pids.append(gateway.pid)
            urls.append(url)
        return asyncio.run(play_rounds(urls, pids, arguments))


async def play_rounds(urls: list[str], pids: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Play rounds with one and with both gateways in turns; the first round opens connections and fills caches."""
    groups, rounds = (256, 3) if arguments.quick else (512, 7)
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for number in range(rounds + 1):
        for shards in (1, 2) if number % 2 else (2, 1):
            async with ShardedGatewayClient(urls[:shards], TOKENS["ROSE_TRAINER_TOKEN"]) as client:
                before_s, began_s = [cpu_s(pid) for pid in pids], time.perf_counter()
                names = [f"{shards}-{number}/{group}" for group in range(groups)]
                members = ((name, member) for name in names for member in range(GROUP))
                await asyncio.gather(*(play(client, *one, arguments.seed) for one in members))
                seconds = time.perf_counter() - began_s
                spent_s = [cpu_s(pid) - early for pid, early in zip(pids, before_s)]
            turns = groups * GROUP * TURNS
            share = max(spent_s) / sum(spent_s)
            rates = {
                "turns_s": turns / seconds,
                "capacity": turns / max(spent_s),
                "cpu_ms": 1e3 * sum(spent_s) / turns,
                "busiest_share": share,
            }
            if number:
                found[shards].append(rates)
    rows = []
    for shards, rates in found.items():
        row: dict[str, Any] = {"case": "live", "shards": shards, "trajectories": groups * GROUP, "turns": turns}
        harness.put_ratio(row, "turns_s", [rate["turns_s"] for rate in rates])
        harness.put_ratio(row, "turns_s_capacity", [rate["capacity"] for rate in rates])
        row["gateway_cpu_ms_per_turn"] = statistics.median(rate["cpu_ms"] for rate in rates)
        row["busiest_share"] = statistics.median(rate["busiest_share"] for rate in rates)
        rows.append(row)
    harness.put_ratio(rows[1], "speedup", [two["capacity"] / one["capacity"] for one, two in zip(found[1], found[2])])
    harness.put_ratio(
        rows[1], "wall_speedup", [two["turns_s"] / one["turns_s"] for one, two in zip(found[1], found[2])]
    )
    return rows


async def play(client: ShardedGatewayClient, group: str, member: int, seed: int) -> None:
    name, chance = f"{group}/{member}", random.Random(f"{seed}/{group}/{member}")
    await client.begin(BeginBody(id=name, group=group, group_size=GROUP, seed=1))
    generate = client.trajectory(name)
    ids = [chance.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
    for turn in range(TURNS):
        answer = await generate(ids, TurnSampling(max_tokens=ANSWER_TOKENS, seed=turn))
        ids = [*ids, *answer.token_ids, *(chance.randrange(VOCABULARY) for _ in range(8))]
    await client.finish(name, FinishBody(reward=float(member % 2)))


def of_many_devices(arguments: argparse.Namespace, begun: dict[str, Any]) -> int:
    devices = arguments.devices
    step = dataclasses.replace(
        one_step(arguments), dedicated=devices, groups=10 * devices // 8, turns_max=2, tokens_max=32, coarseness=4,
        begun_at_once=max(1, devices // 10), beat_s=5.0, lease_s=20.0, max_concurrency=8,
    )  # fmt: skip
    hosts = {"virtual": SimulatedGateway, "16 shards": ManyDevices, "16 shards, one killed": OneKilled}
    with ProcessPoolExecutor(max_workers=2) as processes:  # some gigabytes each
        futures = [processes.submit(virtual_row, case, step, host) for case, host in hosts.items()]
        for future in as_completed(futures):
            print(future.result(), file=sys.stderr, flush=True)
    rows = [future.result() for future in futures]
    for row in rows:
        row["completion_ratio"] = round(row["completion_s"] / rows[0]["completion_s"], 3)
    harness.print_table(rows, COLUMNS)
    bars = [
        harness.wanted(
            f"a step, {row['case']}, over one with one gateway", row["completion_ratio"], COMPLETION_MAX, at_most=True
        )
        for row in rows[1:]
    ]
    return harness.finish(arguments, "shards", rows, bars, begun)


def virtual_row(case: str, step: Scenario, host: type[SimulatedGateway]) -> dict[str, Any]:
    """Play one step. The simulator checks every token, turn and group, also over a kill."""
    gc.set_threshold(1_000_000, 50, 1000)  # millions of live objects: a collection takes seconds and finds nothing
    began_s = time.process_time()
    report = simulate(step, host=host)
    assert report.is_fine, report.violation
    assert report.counts["trajectories"] == step.groups * step.group_size
    return {
        "case": case,
        "shards": getattr(host, "count", 1),
        "devices": step.dedicated,
        "trajectories": report.counts["trajectories"],
        "turns": report.counts["ended"],
        "completion_s": round(report.virtual_s - SETTLE_S, 2),
        "moved": report.counts.get("moved", 0),
        "restarts": report.counts.get("restarts", 0),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def virtual_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = [virtual_row("virtual", one_step(arguments), host) for host in (SimulatedGateway, SixteenShards)]
    rows[1]["completion_ratio"] = round(rows[1]["completion_s"] / rows[0]["completion_s"], 3)
    return rows


def one_step(arguments: argparse.Namespace) -> Scenario:
    """Return a world without faults, whose trainer begins one step and ends when it has its batch."""
    devices = 32 if arguments.quick else 128
    return dataclasses.replace(
        random_scenario(arguments.seed), trouble_s=0.0, dedicated=devices, borrowed=0, faults_per_s=0.0, vanishing=0.0,
        ahead=1, max_staleness=0, groups=4 * devices, group_size=8, turns_max=8, tokens_max=300, max_concurrency=4,
        kv_blocks=2048, max_waiting=1 << 20, wait_s=3600.0, idle_s=1e6, lease_s=5.0, beat_s=1.0, think_s=0.2,
        router="cost", borrowed_max=None, dedicated_max=None,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
