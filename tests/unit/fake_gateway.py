"""A gateway in one object, for what plays through one: no sockets, no workers, nothing waits unless a test wants it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from rose.api.requests import TurnAnswer, TurnSampling, VersionSpan
from rose.api.trajectories import Batch, BeginBody, FinishBody, FinishedGroup
from rose.core.trajectory import NO_VERSION, Trajectory
from rose.models.model_folder import ModelFolder


class FakeGateway:
    """Plays by the dice of the sampling's seed, keeps trajectories as the gateway does, and hands out groups.

    Turns are written by `version`. `pause` is awaited before every turn: a test holds one back there, or all.
    """

    def __init__(self, model: ModelFolder, *, waits: bool = False) -> None:
        self.waits = waits  # for groups that are not complete yet
        self._news = asyncio.Event()
        self._tokenizer = model.tokenizer
        self._turns: dict[str, Trajectory] = {}
        self._groups: dict[str, list[str]] = {}
        self._sizes: dict[str, int] = {}
        self._finished: dict[str, FinishBody] = {}
        self._handed_out: list[str] = []
        self.version = "1"
        self.tamper = lambda trajectories: trajectories
        self.pause: Callable[[str], Awaitable[None]] = lambda name: asyncio.sleep(0)

    async def begin(self, body: BeginBody) -> None:
        assert body.id is not None
        if body.group is not None and body.id not in self._groups.setdefault(body.group, []):
            self._groups[body.group].append(body.id)
            self._sizes[body.group] = body.group_size

    def session(self, name: str) -> str:
        return name

    def trajectory(self, name: str, priority: int = 0) -> Any:
        async def generate(token_ids: Sequence[int], sampling: TurnSampling) -> TurnAnswer:
            await self.pause(name)
            word = random.Random(f"{sampling.seed}/{len(token_ids)}").choice(("Right", "Down"))
            end = self._tokenizer.encode("<|im_end|>", add_special_tokens=False)
            ids = [*self._tokenizer.encode(f"<answer>{word}</answer>", add_special_tokens=False), *end]
            answer = TurnAnswer(tuple(ids), (-0.5,) * len(ids), (VersionSpan(self.version, 0, len(ids)),), "stop")
            self._keep(name, token_ids, answer)
            return answer

        return generate

    async def finish(self, name: str, body: FinishBody) -> None:
        assert name not in self._finished
        self._finished[name] = body
        self._news.set()

    async def next_batch(self, groups: int, after: int) -> Batch:
        while len(complete := self._complete()) < groups:
            assert self.waits, "the run would wait for ever"
            self._news.clear()
            await self._news.wait()
        self._handed_out += complete[:groups]
        return Batch(after + 1, tuple(self._group(name) for name in complete[:groups]))

    def _complete(self) -> list[str]:
        return [name for name in self._groups if name not in self._handed_out and self._is_complete(name)]

    def _is_complete(self, group: str) -> bool:
        members = self._groups[group]
        return len(members) == self._sizes[group] and all(member in self._finished for member in members)

    def _group(self, name: str) -> FinishedGroup:
        whole = [member for member in self._groups[name] if not self._finished[member].is_lost]
        found = [replace(self._turns[member], reward=self._finished[member].reward) for member in whole]
        return FinishedGroup(name, "", tuple(self.tamper(found)), len(self._groups[name]) - len(whole))

    def _keep(self, name: str, prompt: Sequence[int], answer: TurnAnswer) -> None:
        """One more turn behind what was written before, if the prompt goes on from there."""
        ids = (*prompt, *answer.token_ids)
        before = self._turns.get(name)
        known = before.versions if before is not None and before.token_ids == ids[: len(before.token_ids)] else ()
        asked = (NO_VERSION,) * (len(prompt) - len(known))
        versions = (*known, *asked, *(self.version for _ in answer.token_ids))
        mask = tuple(version != NO_VERSION for version in versions)
        logprobs = tuple(-0.5 * is_own for is_own in mask)
        self._turns[name] = Trajectory(name, "", ids, mask, logprobs, versions, 0.0)
