"""The rollout side's client: trajectories of many turns in a closed loop, as a process that yields to all others.

    python -m coserving.rollouts ORDER RESULT

A turn's prompt is everything before it and some new tokens, as an environment would add them. A turn that an eviction
ended goes on with what it already has; a device that is full is asked again when it says. What counts as harvested is
every generated token, and every prompt token that was really computed for a turn, once: computing a prompt again after
an eviction is work thrown away. Tokens count when their turn is answered; with 32 turns under way this lags a little
behind, by as much at the end of a stretch as at its beginning.

The process says `running` when every trajectory has had a turn, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from coserving.children import environment, loop_factory

NICE = 10
LOOK_S = 0.25
NEW_TOKENS = 24
ANSWER_TOKENS = (8, 32)
VOCABULARY = 64  # ids below this are ordinary tokens of every preset
BUSY = (429, 503)
RETRY_S = (0.02, 5.0)
START_S_MAX = 10.0
STOP_S_MAX = 30.0
FAILURES_MAX = 100


class Order(msgspec.Struct):
    url: str
    token: str
    seed: int
    trajectories: int = 32
    turns: int = 10
    salt: str = ""  # of its own for every run: the same seed must not find its prompts in the device's prefix cache


class Harvest(msgspec.Struct):
    """`tokens` so far at moments of the monotonic clock, and what else happened in all."""

    at_s: list[float] = []
    tokens: list[float] = []
    turns: int = 0
    generated: int = 0
    prefilled: int = 0
    thrown_away: int = 0
    aborts: int = 0
    refusals: int = 0
    cpu_s: float = 0.0
    turn_p50_s: float = 0.0
    failure: str = ""

    def between(self, begin_s: float, end_s: float) -> float | None:
        """Tokens in a stretch of time that was watched; None if it was not."""
        if len(self.at_s) < 2 or begin_s < self.at_s[0] or end_s > self.at_s[-1] + 2 * LOOK_S:
            return None
        return self.at(end_s) - self.at(begin_s)

    def at(self, moment_s: float) -> float:
        return float(np.interp(moment_s, self.at_s, self.tokens))


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def computed(self) -> int:
        return self.prompt_tokens - (self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0)


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_encoder = msgspec.json.Encoder()
_replies = msgspec.json.Decoder(_Reply)


class Broken(Exception):
    """The device answers with something that is no answer."""


@dataclass
class Client:
    """All trajectories, over one pool of connections."""

    session: aiohttp.ClientSession
    order: Order
    harvest: Harvest
    had_a_turn: set[int]

    def __post_init__(self) -> None:
        self.turns_s: list[float] = []

    async def trajectories(self, place: int) -> None:
        """One after the other, for ever. The first begins in the middle, or all would march in step."""
        chance = random.Random(f"{self.order.seed}/{place}")
        number, played = 0, place % self.order.turns
        while True:
            history = [chance.randrange(VOCABULARY) for _ in range(played * (NEW_TOKENS + sum(ANSWER_TOKENS) // 2))]
            session_id = f"{self.order.seed}-{place}-{number}"
            for _ in range(self.order.turns - played):
                history += [chance.randrange(VOCABULARY) for _ in range(NEW_TOKENS)]
                history += await self._turn(history, chance.randint(*ANSWER_TOKENS), session_id, chance)
                self.had_a_turn.add(place)
            number, played = number + 1, 0

    async def _turn(self, prompt: list[int], wanted: int, session_id: str, chance: random.Random) -> list[int]:
        begun_s, got, is_computed = time.monotonic(), list[int](), False
        while len(got) < wanted:
            reply = await self._ask(prompt + got, wanted - len(got), session_id, chance.randrange(1 << 31))
            choice = reply.choices[0]
            self._count(reply, is_again=is_computed)
            is_computed = is_computed or bool(choice.token_ids)
            got += choice.token_ids
            if choice.finish_reason != "abort":
                break
            self.harvest.aborts += 1
            await asyncio.sleep(0 if choice.token_ids else RETRY_S[0])
        self.harvest.turns += 1
        self.turns_s.append(time.monotonic() - begun_s)
        return got

    def _count(self, reply: _Reply, *, is_again: bool) -> None:
        tokens = len(reply.choices[0].token_ids)
        computed = reply.usage.computed if reply.usage is not None and tokens else 0
        self.harvest.generated += tokens
        if is_again:
            self.harvest.thrown_away += computed
        else:
            self.harvest.prefilled += computed

    async def _ask(self, prompt: list[int], tokens: int, session_id: str, seed: int) -> _Reply:
        sampling = {"temperature": 1.0, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "seed": seed}
        body = _encoder.encode({"token_ids": prompt, "sampling_params": sampling, "cache_salt": self.order.salt})
        headers = {"X-Session-ID": session_id}
        for _ in range(FAILURES_MAX):
            try:
                async with self.session.post("/inference/v1/generate", data=body, headers=headers) as response:
                    data = await response.read()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
                continue
            if response.status == 200:
                return _replies.decode(data)
            if response.status not in BUSY:
                raise Broken(f"{response.status}: {data[:300].decode(errors='replace')}")
            self.harvest.refusals += 1
            await asyncio.sleep(_retry_after_s(response.headers.get("Retry-After", "")))
        raise Broken("the device takes no rollouts")


def _retry_after_s(text: str) -> float:
    try:
        wanted_s = float(text)
    except ValueError:
        wanted_s = 0.2
    return min(RETRY_S[1], max(RETRY_S[0], wanted_s))


async def _watch(harvest: Harvest) -> None:
    while True:
        harvest.at_s.append(time.monotonic())
        harvest.tokens.append(harvest.generated + harvest.prefilled)
        await asyncio.sleep(LOOK_S)


async def _end_of_input() -> None:
    """Whoever started this closes our standard input when it has seen enough."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    await reader.read()


async def _say_when_running(had_a_turn: set[int], trajectories: int) -> None:
    while len(had_a_turn) < trajectories:
        await asyncio.sleep(0.05)
    print("running", flush=True)
    await asyncio.Event().wait()


async def _run(order: Order) -> Harvest:
    harvest, had_a_turn = Harvest(), set[int]()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {order.token}"}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(order.url, connector=connector, headers=headers, timeout=timeout) as session:
        client = Client(session, order, harvest, had_a_turn)
        work = [client.trajectories(place) for place in range(order.trajectories)]
        work += [_watch(harvest), _say_when_running(had_a_turn, order.trajectories), _end_of_input()]
        tasks = [asyncio.create_task(one) for one in work]
        _, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [end for end in ends if isinstance(end, Exception)]
    harvest.failure = str(failures[0]) if failures else ""
    harvest.turn_p50_s = sorted(client.turns_s)[len(client.turns_s) // 2] if client.turns_s else 0.0
    return harvest


def main(arguments: Sequence[str]) -> int:
    os.nice(NICE)
    order = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Order)
    begun_s = time.process_time()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        harvest: Any = runner.run(_run(order))
    harvest.cpu_s = time.process_time() - begun_s
    Path(arguments[1]).write_bytes(msgspec.json.encode(harvest))
    return 0


class Rollouts:
    """The process, from outside: made when it is running, `stop` gives what it harvested."""

    def __init__(self, order: Order, folder: Path) -> None:
        order_path, self._result = folder / "rollout-order.json", folder / "harvest.json"
        order.salt = order.salt or secrets.token_hex(8)
        order_path.write_bytes(msgspec.json.encode(order))
        self._result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "coserving.rollouts", str(order_path), str(self._result)]
        with (folder / "rollouts.log").open("a") as log:
            self._process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._log = folder / "rollouts.log"

    def wait_until_running(self) -> bool:
        """False if it takes very long: a device may lend nothing for a while."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], START_S_MAX)[0])

    def stop(self) -> Harvest:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._result.exists():
            raise SystemExit(f"the rollout client ended with {self._process.returncode}; see {self._log}")
        harvest = msgspec.json.decode(self._result.read_bytes(), type=Harvest)
        if harvest.failure:
            raise SystemExit(f"the rollout client gave up: {harvest.failure}")
        return harvest


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
