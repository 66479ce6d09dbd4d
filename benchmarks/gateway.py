"""What the gateway adds to a turn: time, and CPU time of the control plane; and how many turns a second it can take.

Time: 50 trajectories at once on a worker stub that takes 500 ms per turn, asked directly and through the gateway, in
turns within one run; `added_*_ms` is the difference of the percentiles. The stub is one process with two doors, so the
difference is the gateway and the connection between the two. `turns_s_max` is the same with a stub that takes no time
and a client that asks as fast as it is answered: gateway, stub and client share the cores of this machine. `busy, long
turns` is what a gateway does for many trajectories with answers of 64 tokens: a stub takes 1.5 s for a turn and sends
its tokens in about five messages, for 600 turns at a time. `turns_s_core` is turns per second of CPU of the gateway.

CPU: a real gateway and a real dedicated worker, playing multi-turn trajectories over the token route. Nearly all the
CPU time of the gateway's process and of the worker's front is control: HTTP, checking, placing, the connection between
them, books; the worker's engine is a third process and is not counted, nor is the client. It is read from /proc before
and after; `idle_cpu_ms_s` is what both take in a second in which nothing happens.

Everything is measured with the books in a ledger on disk, as they are when nothing may be lost; the row `in memory`
says what that costs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
from doors.asking import ANSWER_TOKENS, Asking, ask_all
from doors.processes import TOKENS, cpu_s, process, rose, stub

from rose.api.requests import TurnSampling
from rose.api.trajectories import BeginBody, FinishBody
from rose.client import GatewayClient
from rose.models.presets import write_preset

MODEL = "frozenlake-1m"
VOCABULARY = 100
STUB_MS, STUB_TURNS = 500.0, 8
LONG_MS, LONG_TOKENS, LONG_CONCURRENT = 1500.0, 64, 600
COLUMNS = (
    "case", "trajectories", "turns", "turn_tokens", "turns_s", "direct_p50_ms", "direct_p99_ms", "gateway_p50_ms",
    "gateway_p99_ms", "added_p50_ms", "added_p99_ms", "turns_s_max", "turns_s_core", "gateway_cpu_ms_per_turn",
    "agent_cpu_ms_per_turn",
    "control_cpu_ms_per_turn", "idle_cpu_ms_s",
)  # fmt: skip


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--concurrent", type=int, default=64, help="trajectories at once, with the real worker (64)")
    options.add_argument("--stub-concurrent", type=int, default=50, help="turns at once, with the stub (50)")
    options.add_argument("--busy", action="store_true", help="only the row `busy, long turns`")
    arguments = options.parse_args()
    begun = harness.machine()
    rounds = 2 if arguments.quick else 6
    rows = []
    with tempfile.TemporaryDirectory() as place:
        model = write_preset(MODEL, Path(place) / MODEL, seed=0)
        busy = _busy(model, arguments, rounds)
        bars = [harness.wanted("turns a second of the gateway's CPU, long turns", busy["turns_s_core"], 2500)]
        if arguments.busy:
            harness.print_table([busy], COLUMNS)
            return harness.finish(arguments, "gateway", [busy], bars, begun)
        for case in ("stub", "stub, in memory"):
            rows.append(_with_stub(case, model, arguments, rounds))
        rows.append(_at_most(model, arguments))
        for case, turn_tokens in (("short turns", 8), ("long turns", 64)):
            rows.append(_with_worker(case, model, arguments, rounds, turn_tokens))
    rows.append(busy)
    harness.print_table(rows, COLUMNS)
    overall = {
        "added_p50_ms": rows[0]["added_p50_ms"],
        "added_p99_ms": rows[0]["added_p99_ms"],
        "control_cpu_ms_per_turn": max(row["control_cpu_ms_per_turn"] for row in rows[-3:-1]),
        "busy_turns_s_core": busy["turns_s_core"],
        "turns_s_max": rows[2]["turns_s_max"],
    }
    bars += [
        harness.wanted("added_p50_ms", overall["added_p50_ms"], 3, at_most=True),
        harness.wanted("added_p99_ms", overall["added_p99_ms"], 15, at_most=True),
        harness.wanted("control_cpu_ms_per_turn", overall["control_cpu_ms_per_turn"], 1.0, at_most=True),
    ]
    return harness.finish(arguments, "gateway", rows, bars, begun, **overall)


def _gateway(model: Path, case: str) -> list[str]:
    ledger = model.parent / f"{case.replace(' ', '-')}.ledger"
    return rose("gateway", str(model), "--port", "0", *([] if "memory" in case else ["--ledger", str(ledger)]))


def _with_stub(case: str, model: Path, arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    """Directly and through the gateway, one after the other, as often as there are rounds."""
    taken_s: dict[str, list[float]] = {"direct": [], "gateway": []}
    by_round: dict[str, list[dict[str, float]]] = {"direct": [], "gateway": []}
    with process(_gateway(model, case), "ready at") as (gateway, url):
        with process(stub(url, MODEL, STUB_MS), "ready at") as (_, stub_url):
            urls = {"direct": stub_url, "gateway": url}
            for number in range(rounds + 1):
                for way in ("direct", "gateway") if number % 2 == 0 else ("gateway", "direct"):
                    before_s = cpu_s(gateway.pid)
                    found = _ask(urls[way], f"{case}-{way}-{number}", arguments, STUB_TURNS, STUB_MS / 1000)
                    if number:  # the first round opens connections and fills caches
                        taken_s[way] += found
                        by_round[way].append(_percentiles(found) | {"cpu_s": cpu_s(gateway.pid) - before_s})
    direct, through = _percentiles(taken_s["direct"]), _percentiles(taken_s["gateway"])
    row: dict[str, Any] = {
        "case": case,
        "trajectories": arguments.stub_concurrent,
        "turns": len(taken_s["gateway"]),
        "turn_tokens": ANSWER_TOKENS,
        "gateway_cpu_ms_per_turn": 1e3 * sum(r["cpu_s"] for r in by_round["gateway"]) / len(taken_s["gateway"]),
    }
    for name in ("p50_ms", "p99_ms"):
        row |= {f"direct_{name}": direct[name], f"gateway_{name}": through[name]}
        row[f"added_{name}"] = through[name] - direct[name]
        spread = [late[name] - early[name] for early, late in zip(by_round["direct"], by_round["gateway"])]
        row |= {f"added_{name}_low": min(spread), f"added_{name}_high": max(spread)}
    return row


def _at_most(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """How many turns a second, when the worker takes no time."""
    turns = 20 if arguments.quick else 60
    rates = []
    with process(_gateway(model, "as fast as it can"), "ready at") as (gateway, url):
        with process(stub(url, MODEL, 1), "ready at"):
            for number in range(4):
                before_s, began_s = cpu_s(gateway.pid), time.perf_counter()
                asked = len(_ask(url, f"fast-{number}", arguments, turns, 0.0))
                rates.append((asked / (time.perf_counter() - began_s), (cpu_s(gateway.pid) - before_s) / asked))
    best = rates[1:]
    return {
        "case": "as fast as it can",
        "trajectories": arguments.stub_concurrent,
        "turns": arguments.stub_concurrent * turns * len(best),
        "turn_tokens": ANSWER_TOKENS,
        "turns_s_max": statistics.median(rate for rate, _ in best),
        "gateway_cpu_ms_per_turn": 1e3 * statistics.median(cpu for _, cpu in best),
        "turns_s_core": 1 / statistics.median(cpu for _, cpu in best),
    }


def _busy(model: Path, arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    """What a turn of many tokens costs the gateway, with many trajectories at once."""
    taken, cpus_s = 0, []
    with process(_gateway(model, "busy"), "ready at") as (gateway, url):
        with process(stub(url, MODEL, LONG_MS), "ready at"):
            for number in range(rounds + 1):
                asking = Asking(
                    url, TOKENS["ROSE_AGENT_TOKEN"], LONG_CONCURRENT, 2, LONG_MS / 1000, f"busy-{number}",
                    arguments.seed, LONG_TOKENS,
                )  # fmt: skip
                before_s = cpu_s(gateway.pid)
                turns = len(asyncio.run(ask_all(asking)))
                if number:  # the first round opens connections
                    taken += turns
                    cpus_s.append((cpu_s(gateway.pid) - before_s) / turns)
    return {
        "case": "busy, long turns",
        "trajectories": LONG_CONCURRENT,
        "turns": taken,
        "turn_tokens": LONG_TOKENS,
        "gateway_cpu_ms_per_turn": 1e3 * statistics.median(cpus_s),
        "turns_s_core": 1 / statistics.median(cpus_s),
    }


def _ask(url: str, label: str, arguments: argparse.Namespace, turns: int, spread_s: float) -> list[float]:
    token = TOKENS["ROSE_AGENT_TOKEN"]
    asking = Asking(url, token, arguments.stub_concurrent, turns, spread_s, label, arguments.seed)
    return asyncio.run(ask_all(asking))


def _percentiles(taken_s: list[float]) -> dict[str, float]:
    return {"p50_ms": 1e3 * float(np.percentile(taken_s, 50)), "p99_ms": 1e3 * float(np.percentile(taken_s, 99))}


def _with_worker(
    case: str, model: Path, arguments: argparse.Namespace, rounds: int, turn_tokens: int
) -> dict[str, Any]:
    with process(_gateway(model, case), "ready at") as (gateway, url):
        worker = rose("serve", "--lend", str(model), "--rollout-port", "0", "--gateway", url, "--worker-name", "worker")
        with process([*worker, "--kv-memory-mb", "256"], "is ready") as (front, _):
            client = _Client(url, arguments.concurrent, rounds, turn_tokens, arguments.seed)
            figures = asyncio.run(client.run(gateway.pid, front.pid))
    turns = figures["turns"]
    return {
        "case": case,
        "trajectories": arguments.concurrent,
        "turns": turns,
        "turn_tokens": figures["tokens"] / turns,
        "turns_s": turns / figures["seconds"],
        "gateway_cpu_ms_per_turn": figures["gateway_s"] / turns * 1e3,
        "agent_cpu_ms_per_turn": figures["agent_s"] / turns * 1e3,
        "control_cpu_ms_per_turn": (figures["gateway_s"] + figures["agent_s"]) / turns * 1e3,
        "idle_cpu_ms_s": figures["idle_ms_s"],
    }


class _Client:
    """Plays trajectories of ten turns; the observations between them are a few random tokens."""

    def __init__(self, url: str, concurrent: int, rounds: int, turn_tokens: int, seed: int) -> None:
        self._url, self._concurrent, self._rounds, self._turn_tokens = url, concurrent, rounds, turn_tokens
        self._random = random.Random(seed)
        self._turns = self._tokens = 0

    async def run(self, *pids: int) -> dict[str, float]:
        async with GatewayClient(self._url, TOKENS["ROSE_TRAINER_TOKEN"]) as client:
            while not any(member["state"] == "open" for member in (await client.pool())["members"]):
                await asyncio.sleep(0.1)
            await self._round(client, "warm")
            self._turns = self._tokens = 0
            before, began_s = [cpu_s(pid) for pid in pids], time.monotonic()
            for number in range(self._rounds):
                await self._round(client, str(number))
            after, seconds = [cpu_s(pid) for pid in pids], time.monotonic() - began_s
            await asyncio.sleep(3.0)
            idle_s = sum(cpu_s(pid) for pid in pids) - sum(after)
        gateway_s, agent_s = (late - early for early, late in zip(before, after))
        return {
            "turns": self._turns,
            "tokens": self._tokens,
            "seconds": seconds,
            "gateway_s": gateway_s,
            "agent_s": agent_s,
            "idle_ms_s": idle_s / 3.0 * 1e3,
        }

    async def _round(self, client: GatewayClient, name: str) -> None:
        await asyncio.gather(*(self._play(client, f"{name}-{number}") for number in range(self._concurrent)))
        await client.next_batch(self._concurrent // 8, self._batch_before(name))

    def _batch_before(self, name: str) -> int:
        return 0 if name == "warm" else int(name) + 1

    async def _play(self, client: GatewayClient, name: str) -> None:
        group = f"{name.split('-')[0]}-{int(name.split('-')[1]) // 8}"
        await client.begin(BeginBody(id=name, group=group, group_size=8, seed=1))
        generate = client.trajectory(name)
        ids = self._some(60)
        for number in range(10):
            most = self._turn_tokens + self._random.randint(-self._turn_tokens // 4, self._turn_tokens // 4)
            answer = await generate(tuple(ids), TurnSampling(max_tokens=most, seed=number))
            self._turns += 1
            self._tokens += len(answer.token_ids)
            ids += [*answer.token_ids, *self._some(20)]
        await client.finish(name, FinishBody(reward=self._random.random()))

    def _some(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]


if __name__ == "__main__":
    sys.exit(main())
