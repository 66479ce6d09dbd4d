"""An agent that lends in a process of its own, so that a step of the kit can kill it.

    python -m rose.verify.lending_process SETTINGS SERVING_URL ROLLOUT_MODEL

It starts a rollout engine beside the serving engine, keeps turns under way, prints the engine's process group, and runs
until it is ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path

import msgspec

from rose.verify.kit_results import KitSettings
from rose.verify.rollout_side import RolloutSide, lending_of, rollout_engine
from rose.vllm.engine_process import PR_SET_PDEATHSIG
from rose.vllm.vllm_agent import VllmEngineClient


async def lend(settings: KitSettings, serving_url: str, model: Path) -> None:
    """Lend until this process ends."""
    engine = rollout_engine(settings, model)
    side = RolloutSide(VllmEngineClient(lending_of(settings, engine, serving_url, "idle")))
    await side.client.start()
    try:
        async with side.turning():
            print(f"group {side.group}", flush=True)
            await asyncio.Event().wait()
    finally:
        await side.close()


def main(settings: str, serving_url: str, model: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    decoded = msgspec.json.decode(Path(settings).read_bytes(), type=KitSettings)
    asyncio.run(lend(decoded, serving_url, Path(model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
