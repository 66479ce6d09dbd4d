"""Many trajectories at once on the token route, each turn timed from its first byte sent to its last received.

Trajectories begin spread over one turn's time: turns of real agents do not come in step.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp
import msgspec

PROMPT_TOKENS, OBSERVATION_TOKENS, ANSWER_TOKENS = 256, 24, 16
VOCABULARY = 100
_encoder = msgspec.json.Encoder()


class _Choice(msgspec.Struct):
    token_ids: list[int]


class _Reply(msgspec.Struct):
    choices: list[_Choice]


_reply = msgspec.json.Decoder(_Reply)


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked: so many trajectories at once, each of so many turns."""

    url: str
    token: str
    concurrent: int
    turns: int
    spread_s: float
    label: str  # names the trajectories, so that none is taken for an earlier one
    seed: int = 0
    answer_tokens: int = ANSWER_TOKENS


async def ask_all(asking: Asking) -> list[float]:
    """The seconds that every turn took."""
    headers = {"Authorization": f"Bearer {asking.token}", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
        played = await asyncio.gather(*(_play(http, asking, number) for number in range(asking.concurrent)))
    return [seconds for turns in played for seconds in turns]


async def _play(http: aiohttp.ClientSession, asking: Asking, number: int) -> list[float]:
    dice = random.Random(f"{asking.seed}/{asking.label}/{number}")
    await asyncio.sleep(dice.uniform(0, asking.spread_s))
    ids, taken_s = _some(dice, PROMPT_TOKENS), []
    headers = {"X-Session-ID": f"{asking.label}-{number}"}
    for turn in range(asking.turns):
        sampling = {"max_tokens": asking.answer_tokens, "seed": turn, "logprobs": 1, "temperature": 1.0}
        body = _encoder.encode({"token_ids": ids, "sampling_params": sampling})
        began_s = time.perf_counter()
        async with http.post(f"{asking.url}/inference/v1/generate", data=body, headers=headers) as reply:
            data = await reply.read()
        taken_s.append(time.perf_counter() - began_s)
        if reply.status != 200:
            raise SystemExit(f"{asking.url} said {reply.status}: {data[:300]!r}")
        ids = [*ids, *_reply.decode(data).choices[0].token_ids, *_some(dice, OBSERVATION_TOKENS)]
    return taken_s


def _some(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(count)]
