"""What the control plane costs: CPU time of gateway and agent per turn, with many trajectories at once.

A real gateway and a real dedicated worker, as processes. Nearly all the CPU time of the gateway's process and of the
worker's front is control: HTTP, checking, placing, the connection between them, books; the worker's engine is a third
process and is not counted, nor is the client.
The client plays multi-turn trajectories over the token route: each turn's prompt is all that came before. CPU time is
read from /proc before and after; `idle_cpu_ms_s` is what both take in a second in which nothing happens.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

from rose.envs.play import TurnSampling
from rose.models.presets import write_preset
from rose.rollout.client import GatewayClient
from rose.rollout.trainer_routes import BeginBody, FinishBody

MODEL = "frozenlake-1m"
TOKENS = {f"ROSE_{role}_TOKEN": f"a-token-of-{role}" for role in ("AGENT", "WORKER", "TRAINER")}
VOCABULARY = 100
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
COLUMNS = (
    "case", "trajectories", "turns", "turn_tokens", "turns_s", "gateway_cpu_ms_per_turn", "agent_cpu_ms_per_turn",
    "control_cpu_ms_per_turn", "idle_cpu_ms_s",
)  # fmt: skip


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--concurrent", type=int, default=64, help="trajectories at once")
    arguments = options.parse_args()
    begun = harness.machine()
    rounds = 2 if arguments.quick else 6
    rows = []
    with tempfile.TemporaryDirectory() as place:
        model = write_preset(MODEL, Path(place) / MODEL, seed=0)
        for case, turn_tokens in (("short turns", 8), ("long turns", 64)):
            rows.append(_measure(case, model, arguments, rounds, turn_tokens))
    harness.print_table(rows, COLUMNS)
    bars = [
        harness.wanted(f"{row['case']}: control_cpu_ms_per_turn", row["control_cpu_ms_per_turn"], 1.5, at_most=True)
        for row in rows
    ]
    worst = max(row["control_cpu_ms_per_turn"] for row in rows)
    return harness.finish(arguments, "gateway", rows, bars, begun, control_cpu_ms_per_turn=worst)


def _measure(case: str, model: Path, arguments: Any, rounds: int, turn_tokens: int) -> dict[str, Any]:
    with _process("the gateway for", "gateway", str(model), "--port", "0") as (gateway, url):
        worker = ("serve", "--lend", str(model), "--rollout-port", "0", "--gateway", url, "--worker-name", "worker")
        with _process("is ready", *worker, "--kv-memory-mb", "256") as (front, _):
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


@contextmanager
def _process(ready: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `rose` command, from the line that says it is ready; with the address in that line."""
    variables = os.environ | TOKENS | {"PYTHONPATH": str(harness.PROJECT / "src")}
    process = subprocess.Popen([sys.executable, "-m", "rose", *words], stdout=subprocess.PIPE, text=True, env=variables)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if ready in line:
                yield process, line.split()[-1].removesuffix("/v1")
                return
        raise SystemExit(f"`rose {words[0]}` did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def cpu_s(pid: int) -> float:
    """User and system time of one process so far, its children not counted."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


if __name__ == "__main__":
    sys.exit(main())
