"""Rollouts that never stop: groups begin as the staleness bound allows, and the trainer takes those that have ended.

`core.staleness` says which groups to begin, which are too old and which make a batch; here they are played, their ends
are told, and their tokens fetched, one group after the other as the gateway hands them out. Of turns that wait for a
worker those of the older groups go first: a group that is overtaken grows old for nothing.

As in a synchronous step, what comes back is compared with what was played, and every trajectory is in the books: it
comes back once or is written off. Between two steps there are always groups under way and groups that wait for the
trainer. A checkpoint has their numbers, and a run that goes on from it plays them again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from rose.core.groups import Draw, Drop, Keep, StepGroups
from rose.core.staleness import GroupStream, Unmet
from rose.core.trajectory import Trajectory
from rose.errors import RequestRefused
from rose.launch.rollouts import Played, Rollouts, tokens_of_agents
from rose.rollout.trajectories import FinishedGroup

SURPLUS = "surplus"


class Flow:
    """One per run. `version` is that of the trainer's weights; `on_unmet` is told of a bound that cannot be met."""

    def __init__(self, rollouts: Rollouts, stream: GroupStream, on_unmet: Callable[[Unmet], None]) -> None:
        self.version = 0
        self._rollouts, self._stream, self._ledger = rollouts, stream, rollouts.ledger
        self._on_unmet = on_unmet
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # all there are: nobody else holds them
        self._playing: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._due: dict[str, int] = {}  # groups that the gateway will hand out, by name
        self._members: dict[str, Trajectory] = {}  # that were played, of groups still due
        self._wanted: dict[int, tuple[int, ...]] = {}
        self._here: dict[int, list[Trajectory]] = {}
        self._played = Played([], StepGroups())
        self._ended_since = Played([], StepGroups())
        self._has_told = False

    def begin(self, version: int) -> None:
        """Whatever the bound allows is begun."""
        self.version = version
        self._draw()

    def published(self, version: int) -> None:
        """The trainer's weights are these now."""
        self.version = version
        self._changed.set()

    def reached(self, batches: int) -> None:
        """Every worker runs what so many batches made: others may begin."""
        self._stream.reached(batches)
        self._draw()

    def state(self) -> dict[str, Any]:
        """As `Rollouts.state`. One that was dropped is outstanding until it has come back: the books wait for it."""
        return self._rollouts.state({*self._stream.not_taken, *self._due.values()})

    async def take(self) -> Played:
        """The next batch, as soon as there is one, and what was played since the last. Raises what ended the flow."""
        while True:
            self._raise_failure()
            self._changed.clear()
            self._drop_stale()
            groups = self._stream.batch(self.version)
            if groups is not None:
                break
            self._draw()
            await self._changed.wait()
        played, self._played = self._played, Played([], StepGroups())
        played.kept = [self._here.pop(group) for group in groups]
        played.counts, self._has_told = self._stream.take_counts(), False
        self._rollouts.journal(played.counts, [])
        self._ledger.close_step(self._not_back())
        self._draw()
        return played

    def take_ended(self) -> Played:
        """Counts of what has ended since this was asked before, in whichever batch it comes."""
        ended, self._ended_since = self._ended_since, Played([], StepGroups())
        return ended

    async def end(self) -> None:
        """The job is over: what is under way is stopped and told, and all that was begun comes back."""
        self._raise_failure()
        surplus = self._stream.end()
        if surplus:
            self._rollouts.journal(StepGroups(surplus=len(surplus)), list(surplus))
        stopped = await self._stop_playing()
        for group, member in stopped:
            self._ledger.write_off(self._rollouts.member_id(group, member))
        await asyncio.gather(*(self._tell(group, member, SURPLUS) for group, member in stopped))
        while self._due:
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        await self.leave()
        self._ledger.close_step()

    async def leave(self) -> None:
        """Nothing is under way any more, and nobody is told."""
        await self._stop_playing()
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    # Playing

    def _draw(self) -> None:
        for draw in self._stream.to_draw() if self._failure is None else ():
            self._rollouts.journal(draw, [])
            self._due[self._rollouts.group_name(draw.group)] = draw.group
            for member in range(draw.size):
                self._begin(draw, member)
        self._rollouts.groups.next_group = self._stream.next_group  # where a run that is resumed goes on
        if self._due and self._fetching is None:
            self._fetching = self._started(self._fetch())

    def _begin(self, draw: Draw, member: int) -> None:
        self._ledger.begin(self._rollouts.member_id(draw.group, member))
        self._playing[draw.group, member] = self._started(self._play(draw.group, member))

    async def _play(self, group: int, member: int) -> None:
        outcome = await self._rollouts.play_member(group, member, priority=group)
        self._ended(group, member, outcome)
        self._started(self._tell(group, member, outcome))

    async def _tell(self, group: int, member: int, outcome: Trajectory | str) -> None:
        with contextlib.suppress(RequestRefused):  # one that the gateway has forgotten is found by the ledger
            await self._rollouts.tell_end(group, member, outcome)

    def _ended(self, group: int, member: int, outcome: Trajectory | str) -> None:
        self._playing.pop((group, member), None)
        name = self._rollouts.member_id(group, member)
        if isinstance(outcome, str):
            self._ledger.write_off(name)
            self._played.failures.append(outcome)
            fate = self._stream.lost(group, member)
        else:
            self._members[name] = outcome
            self._played.add(outcome)
            self._ended_since.add(outcome)
            fate = self._stream.finished(group, member, outcome.reward)
        self._rollouts.note_end(group, member, outcome, fate)
        if isinstance(fate, Keep):
            self._wanted[group] = fate.members
        elif isinstance(fate, Drop):
            self._changed.set()

    async def _stop_playing(self) -> list[tuple[int, int]]:
        """Members that had not ended."""
        playing, self._playing = self._playing, {}
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)
        return list(playing)

    # What comes back

    async def _fetch(self) -> None:
        while True:
            for group in await self._rollouts.take_groups(1):
                self._came(group)
            self._changed.set()

    def _came(self, finished: FinishedGroup) -> None:
        by_id = self._rollouts.take_back(finished.trajectories, self._members)
        tokens = tokens_of_agents(by_id, self._members)
        self._played.generated_tokens += tokens
        self._ended_since.generated_tokens += tokens
        for trajectory in finished.trajectories:
            self._members.pop(trajectory.trajectory_id, None)
        group = self._due.pop(finished.group, None)
        if group is None or group not in self._wanted:
            return
        names = [self._rollouts.member_id(group, member) for member in self._wanted.pop(group)]
        self._here[group] = [branch for name in names for branch in by_id.get(name, ())]
        lost = self._stream.arrived(group, self._here[group])
        if lost is not None:
            del self._here[group]
        self._drop_stale()

    def _drop_stale(self) -> None:
        for aged, drop in self._stream.drop_stale(self.version):
            del self._here[drop.group]
            self._rollouts.journal(aged, [drop])
        unmet = self._stream.unmet
        if unmet is not None and not self._has_told:
            self._has_told = True
            self._on_unmet(unmet)

    # Inside

    def _not_back(self) -> list[str]:
        """Trajectories of groups that the gateway has not handed out yet."""
        size = self._rollouts.groups.rules.size
        return [self._rollouts.member_id(group, member) for group in self._due.values() for member in range(size)]

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            self._failure = error
        self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
