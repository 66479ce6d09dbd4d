"""Agents that play their scripts at a gateway, a trainer that takes what they played, and the comparison of the two.

Every agent keeps its own books: the ids of its trajectory, token by token, and how many turns it took. What the trainer
gets in batches must be that, each trajectory once. Missing, or shorter than what the agent has seen: *lost*. Twice, in
two branches, or with more turns than the agent took: *doubled*.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from living.scripts import Script
from rose.api.requests import TurnSampling
from rose.api.trajectories import BeginBody, FinishBody
from rose.client import GatewayClient
from rose.core.trajectory import Trajectory

GROUP_SIZE = 8
VOCABULARY = 64  # ids below this are ordinary tokens of every preset


@dataclass(frozen=True, slots=True)
class Played:
    """One trajectory as its agent knows it."""

    name: str
    token_ids: tuple[int, ...]
    turns: int
    turn_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    completion_s: float
    lost: int
    doubled: int
    turns: int
    tokens: int
    turn_s: list[float]
    counts: dict[str, int]


async def play_all(url: str, token: str, scripts: Sequence[Script], concurrent: int, seed: int) -> Outcome:
    """From the first turn to the last trajectory in the trainer's hands."""
    async with GatewayClient(url, token, patience_s=600) as client:
        room = asyncio.Semaphore(concurrent)
        began_s = time.monotonic()
        trainer = asyncio.create_task(_take_all(client, len(scripts)))
        played = await asyncio.gather(
            *(_play(client, room, script, number, len(scripts), seed) for number, script in enumerate(scripts))
        )
        taken = await trainer
        completion_s = time.monotonic() - began_s
        counts = (await client.pool())["counts"]
    lost, doubled = compare(played, taken)
    turns = sum(one.turns for one in played)
    return Outcome(
        completion_s=completion_s,
        lost=lost,
        doubled=doubled + max(0, counts["ended"] - turns),
        turns=turns,
        tokens=sum(len(one.token_ids) for one in played),
        turn_s=[taken_s for one in played for taken_s in one.turn_s],
        counts=counts,
    )


def compare(played: Sequence[Played], taken: Sequence[Trajectory]) -> tuple[int, int]:
    """How many trajectories were lost, and how many doubled."""
    found = {one.trajectory_id: one for one in taken}
    times = Counter(one.trajectory_id.partition("~")[0] for one in taken)
    lost = doubled = 0
    for one in played:
        got = found.get(one.name)
        lost += got is None or got.turns < one.turns or got.token_ids[: len(one.token_ids)] != one.token_ids
        doubled += times[one.name] > 1 or (got is not None and got.turns > one.turns)
    return lost, doubled


async def _play(
    client: GatewayClient, room: asyncio.Semaphore, script: Script, number: int, of: int, seed: int
) -> Played:
    async with room:
        name, group = f"agent-{number}", number // GROUP_SIZE
        size = min(GROUP_SIZE, of - group * GROUP_SIZE)
        await client.begin(BeginBody(id=name, group=f"group-{group}", group_size=size, seed=seed))
        generate, dice = client.trajectory(name), random.Random(f"{seed}/{number}")
        ids: list[int] = []
        taken_s: list[float] = []
        for place, turn in enumerate(script):
            ids += [dice.randrange(VOCABULARY) for _ in range(turn.added_tokens)]
            began_s = time.monotonic()
            answer = await generate(tuple(ids), TurnSampling(max_tokens=turn.answer_tokens, seed=seed + place))
            taken_s.append(time.monotonic() - began_s)
            ids += answer.token_ids
            await asyncio.sleep(turn.wait_s)
        await client.finish(name, FinishBody(reward=dice.random()))
        return Played(name, tuple(ids), len(script), tuple(taken_s))


async def _take_all(client: GatewayClient, trajectories: int) -> list[Trajectory]:
    """As a trainer does, a group at a time, until there are no more."""
    groups = -(-trajectories // GROUP_SIZE)
    taken: list[Trajectory] = []
    for number in range(groups):
        batch = await client.next_batch(1, number)
        taken += [trajectory for group in batch.groups for trajectory in group.trajectories]
    return taken
