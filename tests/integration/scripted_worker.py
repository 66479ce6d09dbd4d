"""A worker process whose tokens are by arithmetic.

python -m tests.integration.scripted_worker GATEWAY MODEL NAME STEP_S; its token comes from ROSE_WORKER_TOKEN.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tests.unit.rollout_world import LoopEngine

from rose.worker import agent


async def work(gateway: str, model: str, name: str, step_s: float) -> None:
    engine = LoopEngine(step_s)
    settings = agent.AgentSettings(gateway, os.environ["ROSE_WORKER_TOKEN"], model, "dedicated", 16, name)
    print("ready", flush=True)
    await agent.run_agent(engine, settings)


if __name__ == "__main__":
    agent.PAUSE_LONGEST_S = 0.3  # type: ignore[misc]
    asyncio.run(work(*sys.argv[1:4], float(sys.argv[4])))  # type: ignore[arg-type]
