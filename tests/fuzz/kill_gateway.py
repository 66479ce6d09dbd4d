"""Kills the gateway again and again under load: nothing may be lost or doubled, and each client must finish.

    python -m tests.fuzz.kill_gateway [--kills 200] [--seed 1] [--json FILE]

The gateway is a process with a ledger. Beside it run, in this process: agents with `GatewayClient`, agents with a plain
OpenAI client and its retries, a trainer that takes batches, and workers with a scripted engine whose right tokens are
known. Kills fall at random: while the gateway starts, right after it is ready, and in the middle of its work. Load goes
on until the last kill; then every trajectory must have come out of the batches exactly once, as its agent saw it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from tests.integration import devices
from tests.integration.gateways import AGENT, TOKENS, TRAINER, WORKER
from tests.unit.rollout_world import LoopEngine

from rose.api.requests import TurnSampling
from rose.api.trajectories import Batch, BeginBody, FinishBody
from rose.client import GatewayClient
from rose.models.presets import write_preset
from rose.worker import agent
from rose.worker.agent import AgentSettings, run_agent

MODEL, VERSION, VOCABULARY = "qwen3-3m", "v1", 264
SIZE, TURNS, TOKENS_MAX = 4, 4, 24  # members of a group, turns of a trajectory, tokens of a turn
PLAYERS, WORKERS = 6, 2  # groups that are played at once
OPENAI_RETRIES = 200  # the client waits at most 8 s between two; a gateway that starts takes one or two
STARTING_SHARE, SOON_SHARE = 0.1, 0.3  # of kills: while the gateway starts, right after it is ready
LOAD_S = 1.0  # longest time between a start and a kill in the middle of work
AFTER_S = 180.0  # for what is under way to end after the last kill


def scripted(prompt: list[int], count: int) -> list[int]:
    """Return the tokens that the scripted engine gives for this prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append((ids[-1] + len(ids)) % VOCABULARY)
    return ids[len(prompt) :]


@dataclass
class Outcome:
    kills: int = 0
    lives: int = 0
    trajectories: int = 0
    turns: int = 0
    batches: list[Batch] = field(default_factory=list)
    told: dict[str, tuple[int, ...]] = field(default_factory=dict)  # all tokens of a trajectory, as its agent saw them
    failures: list[str] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)

    def table(self) -> dict[str, Any]:
        """Return what came of it; every trajectory is compared with what its agent saw."""
        found = [one for batch in self.batches for group in batch.groups for one in group.trajectories]
        times = Counter(one.trajectory_id for one in found)
        different = [one.trajectory_id for one in found if one.token_ids != self.told.get(one.trajectory_id)]
        return {
            "kills": self.kills,
            "lives": self.lives,
            "trajectories": len(self.told),
            "turns": self.turns,
            "batches": len(self.batches),
            "lost": sorted(set(self.told) - set(times)),
            "doubled": sorted(name for name, count in times.items() if count > 1),
            "strange": sorted(set(times) - set(self.told)),
            "different": sorted(different),
            "failed clients": self.failures,
            "longest start s": round(max(self.starts_s, default=0.0), 2),
        }


class Chaos:
    """A gateway at one address, in one life after another, and its clients."""

    def __init__(self, model: Path, ledger: Path, kills: int, seed: int) -> None:
        self.outcome = Outcome()
        self._model, self._ledger, self._kills = model, ledger, kills
        self._chance = random.Random(seed)
        self._is_over = asyncio.Event()
        self._groups = 0
        self._ended = 0
        self._process: asyncio.subprocess.Process | None = None
        with socket.create_server(("127.0.0.1", 0)) as found:
            self._port: int = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    # The gateway

    async def start(self) -> None:
        began_s = time.monotonic()
        settings = [f"port={self._port}", f"ledger={self._ledger}", "beat_s=0.2", "lease_s=3"]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.integration.gateway_process", str(self._model), *settings),
            stdout=asyncio.subprocess.PIPE,
            cwd=devices.ROOT,
            env=devices.environment() | TOKENS,
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if b"ready at" in line:
                self.outcome.lives += 1
                self.outcome.starts_s.append(time.monotonic() - began_s)
                return
        raise AssertionError("the gateway did not start")

    async def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def kill_again_and_again(self) -> None:
        try:
            while self.outcome.kills < self._kills:
                await asyncio.sleep(self._pause_s())
                await self.kill()
                self.outcome.kills += 1
                await self._start_again()
        finally:
            self._is_over.set()

    def _pause_s(self) -> float:
        return self._chance.random() * (0.05 if self._chance.random() < SOON_SHARE else LOAD_S)

    async def _start_again(self) -> None:
        """Start the next life, which may be killed before it is ready."""
        while self._chance.random() < STARTING_SHARE:
            with contextlib.suppress(TimeoutError, AssertionError):
                async with asyncio.timeout(self._chance.random() * 1.5):
                    await self.start()
            await self.kill()
            self.outcome.kills += 1
        await self.start()

    # Clients

    async def play_groups(self, client: GatewayClient) -> None:
        """Play one group after the other until the last kill is over."""
        while not self._is_over.is_set():
            number, self._groups = self._groups, self._groups + 1
            names = [f"{number}-{member}" for member in range(SIZE)]
            await asyncio.gather(*(self._play(client, name, place % 2 == 1) for place, name in enumerate(names)))
            self._ended += 1

    async def _play(self, client: GatewayClient, name: str, is_openai: bool) -> None:
        try:
            group = name.split("-")[0]
            await client.begin(BeginBody(id=name, group=group, group_size=SIZE, seed=5))
            ids = [int(part) % VOCABULARY for part in name.split("-")]
            generate = self._openai_turns(client.session(name)) if is_openai else self._gateway_turns(client, name)
            for number in range(TURNS):
                answer = await generate(ids, number)
                if answer != scripted(ids, TOKENS_MAX):
                    raise AssertionError(f"{name} turn {number}: {answer}")
                ids += [*answer, number]
                self.outcome.turns += 1
            self.outcome.told[name] = tuple(ids[:-1])
            await client.finish(name, FinishBody(reward=float(len(ids))))
        except Exception as error:
            self.outcome.failures.append(f"{name}: {type(error).__name__}: {error}"[:300])

    def _gateway_turns(self, client: GatewayClient, name: str) -> Any:
        turns = client.trajectory(name)

        async def generate(ids: list[int], number: int) -> list[int]:
            answer = await turns(tuple(ids), TurnSampling(max_tokens=TOKENS_MAX, seed=number))
            return list(answer.token_ids)

        return generate

    def _openai_turns(self, session: str) -> Any:
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=AGENT, max_retries=OPENAI_RETRIES, timeout=60,
            default_headers={"X-Session-ID": session},
        )  # fmt: skip

        async def generate(ids: list[int], number: int) -> list[int]:
            wanted = {"return_token_ids": True, "ignore_eos": True}
            reply = await client.completions.create(
                model=MODEL, prompt=ids, max_tokens=TOKENS_MAX, seed=number, extra_body=wanted
            )
            return list(reply.choices[0].model_extra["token_ids"])  # type: ignore[index]

        return generate

    async def train(self, client: GatewayClient) -> None:
        """Take batches, one group at a time, for as long as groups come."""
        while True:
            batch = await client.next_batch(1, len(self.outcome.batches))
            if batch.batch != len(self.outcome.batches) + 1:
                self.outcome.failures.append(f"batch {batch.batch} came after {len(self.outcome.batches)}")
                return
            self.outcome.batches.append(batch)

    async def until_all_is_trained(self) -> None:
        """Wait until each group that was played is in a batch."""
        deadline_s = time.monotonic() + AFTER_S
        while len(self.outcome.batches) < self._ended and time.monotonic() < deadline_s:
            await asyncio.sleep(0.05)


async def run(model: Path, ledger: Path, kills: int, seed: int) -> Outcome:
    agent.PAUSE_LONGEST_S = 0.3  # workers dial again soon: what is tested is the gateway
    chaos = Chaos(model, ledger, kills, seed)
    await chaos.start()
    engines = [LoopEngine(step_s=0.002) for _ in range(WORKERS)]
    background = [
        asyncio.create_task(run_agent(engine, AgentSettings(chaos.url, WORKER, MODEL, "dedicated", 32, f"w{number}")))
        for number, engine in enumerate(engines)
    ]
    try:
        async with GatewayClient(chaos.url, TRAINER) as client:
            await client.publish(VERSION, folder=str(model), wait_s=20)
            training = asyncio.create_task(chaos.train(client))
            background.append(training)
            killing = asyncio.create_task(chaos.kill_again_and_again())
            await asyncio.gather(killing, *(chaos.play_groups(client) for _ in range(PLAYERS)))
            waiting = asyncio.create_task(chaos.until_all_is_trained())
            await asyncio.wait([training, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if training.done() and (error := training.exception()) is not None:
                chaos.outcome.failures.append(f"the trainer: {type(error).__name__}: {error}")
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for engine in engines:
            await engine.close()
        await chaos.kill()
    return chaos.outcome


def is_right(table: dict[str, Any]) -> bool:
    wrong = ("lost", "doubled", "strange", "different", "failed clients")
    return table["trajectories"] > 0 and not any(table[name] for name in wrong)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz.kill_gateway", description="kill the gateway under load")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args(arguments)
    logging.getLogger("rose").setLevel(logging.ERROR)  # workers say each time that the gateway is gone
    with tempfile.TemporaryDirectory(prefix="rose-kills-") as folder:
        model = write_preset(MODEL, Path(folder) / MODEL, seed=0)
        began_s = time.monotonic()
        outcome = asyncio.run(run(model, Path(folder) / "ledger.sqlite", options.kills, options.seed))
    table = outcome.table() | {"seed": options.seed, "seconds": round(time.monotonic() - began_s)}
    for name, value in table.items():
        shown = len(value) if isinstance(value, list) else value
        print(f"{name:<18} {shown}" + (f"  {value[:5]}" if isinstance(value, list) and value else ""))
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=1))
    return int(not is_right(table))


if __name__ == "__main__":
    sys.exit(main())
