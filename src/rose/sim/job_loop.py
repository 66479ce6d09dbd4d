"""Whole RL jobs in virtual time: rollouts, training and weights, step after step, on dedicated and borrowed workers.

`grpo`          every step plays a fixed number of groups, then trains on all of them.
`dapo`          a group whose members all succeed or all fail is replaced as soon as it is complete; the step ends when
                enough mixed groups are, and what still runs is cancelled.
`asynchronous`  rollouts never stop. So many groups are in progress that none needs to be more than `staleness_max`
                versions old when it is trained on; the trainer takes a batch as soon as enough groups are complete and
                those left can all be trained on in time. The job ends with the last training step.

Turns are placed by the router of the core, devices borrowed by its provisioner (`rose.sim.batch_cluster`). Nothing here
decides either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from rose.core.provision import allocation_overhead_s
from rose.core.router import Router
from rose.core.worker_table import WorkerView
from rose.engines.profiles import StepProfile
from rose.sim.batch_cluster import BatchCluster, Feed, PlannedTrajectory
from rose.sim.batch_worker import BatchWorker
from rose.sim.lent_timeline import LentTimeline
from rose.sim.prompt_difficulty import PlannedGroup, PromptSource
from rose.sim.step_costs import StepCosts
from rose.sim.supply_terms import SupplyTerms

Algorithm = Literal["grpo", "dapo", "asynchronous"]
GROUPS_MAX_FACTOR = 64  # of a DAPO step: prompts that give no mixed group so long are not worth sampling


@dataclass(frozen=True, slots=True)
class JobShape:
    """What a job plays: `groups` are trained on in every one of `steps`."""

    algorithm: Algorithm
    groups: int
    steps: int
    dedicated: int
    stride: int = 1  # plays every so many steps of the job's training
    staleness_max: int = 4  # of an asynchronous job, in versions


@dataclass(frozen=True, slots=True)
class JobPool:
    """The borrowed devices of a job: what each lends, by the time at which rollouts begin, and on which terms."""

    lent_at: Callable[[float], Sequence[LentTimeline]] = lambda now_s: ()
    terms: SupplyTerms = field(default_factory=SupplyTerms)


@dataclass(frozen=True, slots=True)
class JobStep:
    """One step.

    Of an asynchronous job, `rollout_s` is the time since the trainer took the batch before, and the last step has all
    evictions, borrowed time and allocation.
    """

    begin_s: float
    rollout_s: float
    train_s: float
    sync_s: float
    trained: tuple[str, ...]  # names of trajectories
    played: int  # trajectories that were begun for it, the trained ones included
    output_tokens: int
    evictions: int = 0
    borrowed_s: float = 0.0
    allocation_s: float = 0.0  # in which some device was being borrowed
    staleness: int = 0  # the largest of its trajectories, in versions


@dataclass(frozen=True, slots=True)
class JobResult:
    """All steps of a job."""

    seconds: float
    steps: tuple[JobStep, ...]

    @property
    def trained_per_s(self) -> float:
        return sum(len(step.trained) for step in self.steps) / self.seconds

    def steady_per_s(self, after: int) -> float:
        """Return trajectories trained on per second of an asynchronous job, without its first `after` steps."""
        counted = self.steps[after:]
        return sum(len(step.trained) for step in counted) / sum(step.rollout_s for step in counted)

    @property
    def rollout_s(self) -> float:
        """Return the mean rollout time of a step."""
        return sum(step.rollout_s for step in self.steps) / len(self.steps)

    @property
    def allocation_share(self) -> float:
        return sum(step.allocation_s for step in self.steps) / self.seconds

    @property
    def demand_ratio(self) -> float:
        """Return the largest number of trajectories that a step played over the smallest."""
        played = [step.played for step in self.steps]
        return max(played) / min(played)


@dataclass(slots=True)
class SampledGroups(Feed):
    """Counts groups as they complete; with `is_dynamic` only mixed ones count, and others are replaced."""

    source: PromptSource
    wanted: int
    step: int
    is_dynamic: bool
    kept: list[PlannedGroup] = field(default_factory=list)
    played: int = 0
    _groups: dict[str, PlannedGroup] = field(default_factory=dict)
    _left: Counter[str] = field(default_factory=Counter)

    def begin(self, count: int) -> list[PlannedTrajectory]:
        """Draw so many groups and return their trajectories."""
        begun: list[PlannedTrajectory] = []
        for group in (self.source.group(self.step) for _ in range(count)):
            self._groups[group.name], self._left[group.name] = group, len(group.trajectories)
            begun += group.trajectories
        self.played += len(begun)
        return begun

    def on_finished(self, trajectory: PlannedTrajectory) -> Sequence[PlannedTrajectory]:
        self._left[trajectory.group] -= 1
        if self._left[trajectory.group]:
            return ()
        group = self._groups[trajectory.group]
        if group.is_mixed or not self.is_dynamic or len(self._groups) >= GROUPS_MAX_FACTOR * self.wanted:
            self.kept.append(group)
            return ()
        return self.begin(1)

    def is_over(self, left: int) -> bool:
        return len(self.kept) >= self.wanted


def play_job(
    shape: JobShape, profile: StepProfile, router: Router, source: PromptSource, costs: StepCosts, pool: JobPool
) -> JobResult:
    """Return what the job did; the same arguments with sources of the same seed give the same result."""
    if shape.algorithm == "asynchronous":
        return _play_asynchronous(shape, profile, router, source, costs, pool)
    now_s, steps = 0.0, []
    for number in range(shape.steps):
        feed = SampledGroups(source, shape.groups, number * shape.stride, shape.algorithm == "dapo")
        cluster = BatchCluster(
            router, profile, shape.dedicated, pool.lent_at(now_s), feed.begin(shape.groups),
            tries_every_arrival=router.kind == "paper", terms=pool.terms, feed=feed, start_s=now_s,
        )  # fmt: skip
        result = cluster.run()
        cluster.close()
        groups = feed.kept[: shape.groups]
        train_s = costs.training_s(sum(_tokens(group) for group in groups))
        allocation_s = allocation_overhead_s(cluster.past_cycles, now_s, cluster.now_s)
        step = JobStep(
            now_s, result.completion_s, train_s, costs.sync_s, _names(groups), feed.played, result.output_tokens,
            result.evictions, result.borrowed_s, allocation_s,
        )  # fmt: skip
        steps.append(step)
        now_s = cluster.now_s + train_s + costs.sync_s
    return JobResult(now_s, tuple(steps))


def _names(groups: Sequence[PlannedGroup]) -> tuple[str, ...]:
    return tuple(trajectory.name for group in groups for trajectory in group.trajectories)


def _tokens(group: PlannedGroup) -> int:
    """Return the tokens to train on: every trajectory's last prompt and answer."""
    return sum(one.turns[-1].prompt_tokens + one.turns[-1].output_tokens for one in group.trajectories)


# Asynchronous


class AsynchronousFeed(Feed):
    """Begins groups within the staleness bound and hands complete batches to the trainer."""

    def __init__(self, source: PromptSource, shape: JobShape) -> None:
        self.source, self.shape = source, shape
        self.version = self.begun = 0
        self.complete: list[PlannedGroup] = []
        self.trained: list[JobStep] = []
        self.on_complete: Callable[[], None] = lambda: None
        self._groups: dict[str, PlannedGroup] = {}
        self._begun_at: dict[str, int] = {}  # the version that each group began with
        self._left: Counter[str] = Counter()

    def allowed(self) -> list[PlannedTrajectory]:
        """Begin the groups that the bound allows now, and return their trajectories."""
        begun: list[PlannedTrajectory] = []
        most = self.shape.groups * (self.version + self.shape.staleness_max + 1)
        while self.begun < most:
            group = self.source.group(self.version)
            self._groups[group.name], self._left[group.name] = group, len(group.trajectories)
            self._begun_at[group.name] = self.version
            begun += group.trajectories
            self.begun += 1
        return begun

    def on_finished(self, trajectory: PlannedTrajectory) -> Sequence[PlannedTrajectory]:
        self._left[trajectory.group] -= 1
        if not self._left[trajectory.group]:
            self.complete.append(self._groups.pop(trajectory.group))
            self.on_complete()
        return ()

    def take(self) -> list[PlannedGroup]:
        """Remove the groups of one batch, the oldest first, and return them; nothing if the trainer has to wait."""
        wanted = self.shape.groups
        ordered = sorted(self.complete, key=lambda group: self._begun_at[group.name])
        batch, left = ordered[:wanted], ordered[wanted:]
        begun = sorted(self._begun_at[name] for name in (*self._groups, *(group.name for group in left)))
        batches = [begun_at + self.shape.staleness_max - self.version for begun_at in begun]
        if len(batch) < wanted or any(place >= wanted * count for place, count in enumerate(batches)):
            return []
        self.complete = left
        return batch

    def staleness(self, groups: Sequence[PlannedGroup]) -> int:
        return max(self.version - self._begun_at[group.name] for group in groups)

    def is_over(self, left: int) -> bool:
        return len(self.trained) == self.shape.steps


class AsynchronousCluster(BatchCluster):
    """A cluster that trains while it plays; at new weights every worker computes its contexts again."""

    def __init__(self, feed: AsynchronousFeed, costs: StepCosts, *args: object, **options: object) -> None:
        self.feed, self.costs = feed, costs
        self._trains = False
        self._begin_s = 0.0
        super().__init__(*args, feed=feed, **options)  # type: ignore[arg-type]
        feed.on_complete = self._train_if_due

    def _train_if_due(self) -> None:
        if self._trains or not (groups := self.feed.take()):
            return
        self._trains = True
        train_s = self.costs.training_s(sum(_tokens(group) for group in groups))
        played = sum(len(group.trajectories) for group in groups)
        tokens = sum(one.output_tokens for group in groups for one in group.trajectories)
        step = JobStep(
            self._begin_s, self.now_s - self._begin_s, train_s, self.costs.sync_s, _names(groups), played,
            tokens, staleness=self.feed.staleness(groups),
        )  # fmt: skip
        self._begin_s = self.now_s
        self._at(self.now_s + train_s + self.costs.sync_s, partial(self._publish, step))

    def _publish(self, step: JobStep) -> None:
        """Run the new version on all workers; a transfer overlaps with generation, the swap does not."""
        self._trains = False
        self.feed.version += 1
        self.feed.trained.append(step)
        for worker in list(self.workers.values()):
            self._advance(worker)
            worker.swap_weights(0.0)
            self._schedule(worker)
            self.router.put_worker(self._view(worker))
        self.add(self.feed.allowed())
        self._train_if_due()
        self._place()

    def _view(self, worker: BatchWorker) -> WorkerView:
        return replace(super()._view(worker), version=str(self.feed.version))


def _play_asynchronous(
    shape: JobShape, profile: StepProfile, router: Router, source: PromptSource, costs: StepCosts, pool: JobPool
) -> JobResult:
    feed = AsynchronousFeed(source, shape)
    cluster = AsynchronousCluster(
        feed, costs, router, profile, shape.dedicated, pool.lent_at(0.0), feed.allowed(),
        tries_every_arrival=router.kind == "paper", terms=pool.terms,
    )  # fmt: skip
    cluster.run()
    seconds = cluster.now_s
    cluster.close()
    last = replace(
        feed.trained[-1], evictions=cluster.result.evictions, borrowed_s=cluster.result.borrowed_s,
        allocation_s=allocation_overhead_s(cluster.past_cycles, 0.0, seconds),
    )  # fmt: skip
    return JobResult(seconds, (*feed.trained[:-1], last))
