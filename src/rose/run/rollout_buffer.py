"""The buffer between rollouts and the trainer: plays groups as the staleness bound allows, and hands out batches.

`core.staleness` decides which groups to begin, which are too old and which make a batch. This module plays them,
reports their ends to the gateway and fetches their tokens, one group after the other as the gateway hands them out.
Turns of older groups go first to the workers, because a group that is overtaken grows old for nothing.

What comes back is compared with what was played, and the ledger counts every trajectory: it comes back once or is
written off. Synchronous training is the bound 0: a batch ends the step, so that the buffer then stops what is left over
and waits until everything has come back. With a larger bound groups are under way or wait for the trainer between two
steps. A checkpoint names them, and a run that resumes from it plays them again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict
from typing import Any

from rose.api.trajectories import FinishedGroup
from rose.core.groups import Draw, Drop, GroupRules, Keep, StepGroups
from rose.core.staleness import GroupStream, StalenessRules, Unmet
from rose.core.trajectory import Trajectory
from rose.errors import RequestRefused
from rose.run.resuming import ResumePoint
from rose.run.run_rollouts import Played, Rollouts, tokens_of_agents

SURPLUS = "surplus"


class RolloutBuffer:
    """The groups of one run that no step has learnt from. `on_unmet` is called when the bound cannot be met."""

    def __init__(
        self,
        rollouts: Rollouts,
        rules: GroupRules,
        bound: StalenessRules,
        start: ResumePoint,
        on_unmet: Callable[[Unmet], None] = lambda unmet: None,
    ) -> None:
        self.version = 0  # of the trainer's weights
        self._rollouts, self._ledger, self._on_unmet = rollouts, rollouts.ledger, on_unmet
        self._stream = GroupStream(rules, bound, next_group=start.next_group, taken=start.step, again=start.outstanding)
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop itself holds no task
        self._playing: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._due: dict[str, int] = {}  # groups that the gateway will hand out, by name
        self._members: dict[str, Trajectory] = {}  # that were played, of groups still due
        self._wanted: dict[int, tuple[int, ...]] = {}
        self._here: dict[int, list[Trajectory]] = {}
        self._played = Played([], StepGroups())
        self._ended_since = Played([], StepGroups())
        self._has_reported_unmet = False

    def begin(self, version: int) -> None:
        """Begin the groups that the bound allows."""
        self.version = version
        self._draw()

    def publish(self, version: int) -> None:
        """Note the version of the trainer's new weights."""
        self.version = version
        self._changed.set()

    def reach(self, batches: int) -> None:
        """Begin the groups that the bound allows, now that every worker runs the weights of so many batches."""
        self._stream.on_reached(batches)
        self._draw()

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to draw the same groups.

        `outstanding` groups were drawn and no step has learnt from them; a dropped one is outstanding until it has come
        back, because the ledger waits for it. They are drawn again, and so they are not in the balance.
        """
        again = sorted({*self._stream.not_taken, *self._due.values()})
        balance = self._ledger.balance(without=self._members_of(again))
        return {"next_group": self._stream.next_group, "outstanding": again, "balance": asdict(balance)}

    async def take(self) -> Played:
        """Return the next batch with what was played since the last. Raises what ended the rollouts."""
        while True:
            self._raise_failure()
            self._changed.clear()
            self._drop_stale()
            groups = self._stream.batch(self.version)
            if groups is not None:
                break
            self._draw()
            await self._changed.wait()
        surplus = self._stream.drop_surplus()
        if self._stream.is_synchronous:
            await self._stop_and_fetch()
        played, self._played = self._played, Played([], StepGroups())
        played.kept = [self._here.pop(group) for group in groups]
        played.counts, self._has_reported_unmet = self._stream.take_counts(), False
        self._rollouts.journal(played.counts, list(surplus))
        self._ledger.close_step(self._members_of(self._due.values()))
        self._draw()
        return played

    def take_ended(self) -> Played:
        """Return the counts of what has ended since the last call, in whichever batch it comes."""
        ended, self._ended_since = self._ended_since, Played([], StepGroups())
        return ended

    async def end(self) -> None:
        """End the job: stop what is under way, and wait until all that was begun has come back."""
        self._raise_failure()
        surplus = self._stream.end()
        if surplus:
            self._rollouts.journal(StepGroups(surplus=len(surplus)), list(surplus))
        await self._stop_and_fetch()
        await self.leave()
        self._ledger.close_step()

    async def leave(self) -> None:
        """Stop everything that is under way, and report nothing."""
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
        if self._due and self._fetching is None:
            self._fetching = self._started(self._fetch())

    def _begin(self, draw: Draw, member: int) -> None:
        self._ledger.begin(self._rollouts.member_id(draw.group, member))
        self._playing[draw.group, member] = self._started(self._play(draw.group, member))

    async def _play(self, group: int, member: int) -> None:
        outcome = await self._rollouts.play_member(group, member, priority=group)
        self._ended(group, member, outcome)
        self._started(self._report_end(group, member, outcome))

    async def _report_end(self, group: int, member: int, outcome: Trajectory | str) -> None:
        with contextlib.suppress(RequestRefused):  # the ledger finds a trajectory that the gateway has lost
            await self._rollouts.report_end(group, member, outcome)

    def _ended(self, group: int, member: int, outcome: Trajectory | str) -> None:
        self._playing.pop((group, member), None)
        name = self._rollouts.member_id(group, member)
        if isinstance(outcome, str):
            self._ledger.write_off(name)
            self._played.failures.append(outcome)
            fate = self._stream.on_lost(group, member)
        else:
            self._members[name] = outcome
            self._played.add(outcome)
            self._ended_since.add(outcome)
            fate = self._stream.on_finished(group, member, outcome.reward)
        self._rollouts.note_end(group, member, outcome, fate)
        if isinstance(fate, Keep):
            self._wanted[group] = fate.members
        elif isinstance(fate, Drop):
            self._changed.set()

    async def _stop_playing(self) -> list[tuple[int, int]]:
        """Cancel the members that have not ended, and return them."""
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
        lost = self._stream.on_arrived(group, self._here[group])
        if lost is not None:
            del self._here[group]
        self._drop_stale()

    def _drop_stale(self) -> None:
        for aged, drop in self._stream.drop_stale(self.version):
            del self._here[drop.group]
            self._rollouts.journal(aged, [drop])
        unmet = self._stream.unmet
        if unmet is not None and not self._has_reported_unmet:
            self._has_reported_unmet = True
            self._on_unmet(unmet)

    # Inside

    async def _stop_and_fetch(self) -> None:
        """Stop the members under way, report them to the gateway, and wait until every group has come back."""
        stopped = await self._stop_playing()
        for group, member in stopped:
            self._ledger.write_off(self._rollouts.member_id(group, member))
        await asyncio.gather(*(self._report_end(group, member, SURPLUS) for group, member in stopped))
        while self._due:
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()

    def _members_of(self, groups: Iterable[int]) -> list[str]:
        size = self._stream.rules.size
        return [self._rollouts.member_id(group, member) for group in groups for member in range(size)]

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
