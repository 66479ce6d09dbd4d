"""Many workers in one process, whose tokens are by arithmetic; some report users as lent devices do.

python -m tests.integration.fleet_of_workers GATEWAY MODEL DEDICATED LENT STEP_S; the token is ROSE_WORKER_TOKEN.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from tests.unit.rollout_world import LoopEngine

from rose.core.history import ServingTimes
from rose.worker import agent

REPORT_S = 1.0


async def report_users(engine: LoopEngine, number: int) -> None:
    """Change the lending status once a second, as a device with users does."""
    chance, lent_s = random.Random(number), 0.0
    engine.lend(ttft_budget_s=0.5, tpot_budget_s=0.05, lent_s=0.0)
    while True:
        await asyncio.sleep(REPORT_S * chance.uniform(0.8, 1.2))
        status = engine.lending_status
        assert status is not None
        if engine.facts.running:
            lent_s += REPORT_S * chance.uniform(0.3, 0.6)
        first_s = 0.08 + 0.05 * chance.random()
        times = ServingTimes(200 + number, first_s, 3 * first_s, 0.012, 0.03, 0.0, 0.01, 0.0, 0.001)
        engine.lend(lent_s=lent_s, serving=times, breaches={"ttft": number % 7 == 0, "ambiguous": number % 3})


async def work(gateway: str, model: str, dedicated: int, lent: int, step_s: float) -> None:
    token, works = os.environ["ROSE_WORKER_TOKEN"], []
    for number in range(dedicated + lent):
        engine, is_lent = LoopEngine(step_s), number >= dedicated
        name, kind = (
            (f"device-{number - dedicated:04}", "borrowed") if is_lent else (f"dedicated-{number}", "dedicated")
        )
        labels = {"rack": f"r{number % 4}"}
        settings = agent.AgentSettings(gateway, token, model, kind, 16, name, labels=labels)  # type: ignore[arg-type]
        if is_lent:
            works.append(report_users(engine, number))
        works.append(agent.run_agent(engine, settings))
    print("ready", flush=True)
    await asyncio.gather(*works)


if __name__ == "__main__":
    agent.PAUSE_LONGEST_S = 0.5  # type: ignore[misc]
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
