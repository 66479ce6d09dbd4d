"""The processes of one run: a gateway, a dedicated worker, and a serving device with its users, lent or not.

The serving device has the first core at the usual priority; everything else, agents and trainer too, shares the others,
the control plane before the dedicated worker, as in `rose run`. On one core all of them share it, and the figures say
nothing about borrowing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose.client import GatewayClient
from rose.run.cpu_affinity import CONTROL_NICENESS, SERVING_NICENESS, TRAINER_NICENESS
from rose.run.process_specs import FOR_GATEWAY, FOR_LENDER, FOR_WORKER, make_tokens
from rose.run.processes import URL, Command, Died, Processes, roses
from rose.run.serving_traffic import TrafficPlan

CORES = tuple(sorted(os.sched_getaffinity(0)))
SERVING_CORE, OTHER_CORES = CORES[0], CORES[1:] or CORES
READY = {"url": rf"ready at {URL}"}
WAIT_S = 600


class _Served(msgspec.Struct):
    outcome: str
    attained: bool | None


_served = msgspec.json.Decoder(_Served)


@dataclass(frozen=True, slots=True)
class Terms:
    serving: Path
    rollout: Path
    traffic: str
    seed: int
    ttft_ms: float
    tpot_ms: float
    kv_memory_mb: int
    sequences: int


@dataclass(slots=True)
class Stage:
    """A run's address and token, and what its users got."""

    url: str
    token: str
    verdicts: list[bool] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    def heard(self, line: bytes) -> None:
        served = _served.decode(line)
        if served.attained is not None and served.outcome != "cut":
            self.verdicts.append(served.attained)


@asynccontextmanager
async def staged(terms: Terms, logs: Path, *, is_lent: bool) -> AsyncIterator[Stage]:
    """Everything is up, the workers have joined and the traffic is on."""
    tokens = make_tokens()
    stage = Stage("", tokens.trainer)

    def on_death(died: Died) -> None:
        stage.deaths.append(f"{died.role} ended with {died.code}")

    processes = Processes(logs, tokens.variables, on_death)
    try:
        ledger = str(logs / "gateway.ledger")
        arguments = roses("gateway", str(terms.rollout), "--port", "0", "--wait-s", str(WAIT_S), "--ledger", ledger)
        command = Command("gateway", arguments, CONTROL_NICENESS, OTHER_CORES, READY, secrets=FOR_GATEWAY)
        gateway = await processes.start(command)
        stage.url = gateway.captured["url"]
        serving = await processes.start(_serving(terms, stage.url if is_lent else None))
        await processes.start(_dedicated(terms, stage.url))
        await processes.start(_traffic(terms, serving.captured["url"]), stage.heard)
        await _joined(stage, 2 if is_lent else 1)
        yield stage
    finally:
        await processes.close()


def _serving(terms: Terms, gateway_url: str | None) -> Command:
    arguments = ["serve", str(terms.serving), "--port", "0", "--device", f"cpu:{SERVING_CORE}"]
    arguments += ["--kv-memory-mb", str(terms.kv_memory_mb)]
    if gateway_url is not None:
        arguments += ["--lend", str(terms.rollout), "--rollout-port", "0", "--gateway", gateway_url]
        arguments += ["--worker-name", "borrowed", "--ttft-ms", f"{terms.ttft_ms:g}", "--tpot-ms", f"{terms.tpot_ms:g}"]
    # Engine and fronts part the cores among themselves.
    return Command("serving", roses(*arguments), SERVING_NICENESS, CORES, READY, secrets=FOR_LENDER)


def _dedicated(terms: Terms, gateway_url: str) -> Command:
    core = OTHER_CORES[-1]
    arguments = ["serve", "--lend", str(terms.rollout), "--rollout-port", "0", "--device", f"cpu:{core}"]
    arguments += ["--kv-memory-mb", str(terms.kv_memory_mb), "--set", f"engine.max_sequences={terms.sequences}"]
    arguments += ["--gateway", gateway_url, "--worker-name", "dedicated"]
    return Command("dedicated", roses(*arguments), TRAINER_NICENESS, OTHER_CORES, READY, secrets=FOR_WORKER)


def _traffic(terms: Terms, url: str) -> Command:
    plan = TrafficPlan(url, terms.traffic, terms.seed, 3600.0, terms.ttft_ms / 1000, terms.tpot_ms / 1000)
    words = ("-m", "rose.run.serving_traffic")
    on = {"on": r"(traffic is on)"}
    return Command("traffic", words, SERVING_NICENESS, OTHER_CORES, on, input=msgspec.json.encode(plan))


async def _joined(stage: Stage, workers: int) -> None:
    async with GatewayClient(stage.url, stage.token) as client:
        while sum(member["state"] == "open" for member in (await client.pool())["members"]) < workers:
            await asyncio.sleep(0.1)
