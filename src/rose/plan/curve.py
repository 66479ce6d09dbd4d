"""Steps a day against the number of borrowed devices: the curve that decides.

`rose.sim.batch_cluster` plays one drawn batch on the job's own workers and on borrowed ones, under the core's router,
pacer and provisioner; a borrowed worker advances when its simulated device lends. That is done for a quiet, a middle
and a busy part of the day, and each hour's rollout speed is interpolated between them by its lent share. The middle is
played with three batches, which gives the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from rose.config.server_settings import GatewaySettings
from rose.core.router import Router
from rose.plan.fleet import Fleet
from rose.plan.job import RlJob, job_on
from rose.plan.traffic import HOUR_S, FleetTraffic
from rose.plan.windows import Estimate, Progress, WindowResult, at_level, mean_estimate
from rose.sim.batch_cluster import BatchCluster, PlannedTrajectory
from rose.sim.batch_worker import BatchWorker
from rose.sim.lent_timeline import LentTimeline
from rose.sim.models import step_shape

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEVELS = (0.1, 0.5, 0.9)  # of the windows by lent share: a busy, a middle and a quiet part of the day
DRAWS = 3  # batches at the middle level
TURNS_MAX = 40_000  # of one run; a larger job is planned at a fraction of its size, workers and all
TIMELINES_MAX = 8  # distinct devices; the others are the same at another time
SHARE_MIN = 0.02  # a job without workers of its own would hardly end on less
LEVELS_APART = 0.02  # closer lent shares count as one


@dataclass(frozen=True, slots=True)
class RolloutRun:
    """One step's rollouts."""

    seconds: float
    borrowed_share: float  # of the work
    evictions: int


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What a number of borrowed devices gives."""

    devices: int
    workers: int
    steps_per_day: Estimate
    rollout_s: float  # on average over the day
    step_s: float
    borrowed_share: float  # of the rollouts' work


@dataclass(frozen=True, slots=True)
class Curve:
    """The points, the time of the longest trajectory alone, and by how much the job was shrunk."""

    points: tuple[CurvePoint, ...]
    longest_s: float
    shrunk_by: int


class MeasuredCluster(BatchCluster):
    """A cluster that adds up how long its own and its borrowed workers computed, in `busy_s`."""

    busy_s = (0.0, 0.0)

    def _account(self, worker: BatchWorker, since_s: float) -> None:
        super()._account(worker, since_s)
        own_s, borrowed_s = self.busy_s
        is_own = worker.timeline is None
        self.busy_s = (own_s + is_own * worker.busy_s, borrowed_s + (not is_own) * worker.busy_s)


def curve_of(
    fleet: Fleet, traffic: FleetTraffic, job: RlJob, results: Sequence[WindowResult], seed: int, progress: Progress
) -> Curve:
    shrink = _shrink(fleet, job)
    batches = [_part(job if draw == 0 else job_on(fleet, job.inputs, seed + draw), shrink) for draw in range(DRAWS)]
    levels = _levels(results)
    counts = list(dict.fromkeys(round(share * fleet.replicas) for share in QUARTERS))
    shares = {hour.hour: fmean(r.lent_share for r in results if r.hour == hour.hour) for hour in traffic.hours}
    points: list[CurvePoint] = []
    total = len(counts) * (len(levels) + DRAWS - 1)
    for number, workers in enumerate(counts):
        done = number * (len(levels) + DRAWS - 1)
        played: list[tuple[float, RolloutRun]] = []
        for place, level in enumerate(levels if workers else levels[:1]):
            progress(done + place, total, f"rollouts on {workers * fleet.degree} borrowed devices")
            played.append((level[0].lent_share, _play(fleet, batches[0], level, workers, shrink)))
        middle = levels[len(levels) // 2]
        others = [_play(fleet, batch, middle, workers, shrink).seconds for batch in batches[1:]]
        points.append(_point(fleet, job, workers, played, others, list(shares.values())))
    longest_s = max(_alone_s(fleet, trajectory) for trajectory in job.trajectories)
    return Curve(tuple(points), longest_s, shrink)


def _point(
    fleet: Fleet, job: RlJob, workers: int, played: list[tuple[float, RolloutRun]], others: list[float],
    shares: list[float],
) -> CurvePoint:  # fmt: skip
    played.sort(key=lambda pair: pair[0])
    known, speeds = [at for at, _ in played], [1 / one.seconds for _, one in played]
    hourly_s = [1 / speed if (speed := float(np.interp(share, known, speeds))) else math.inf for share in shares]
    steps = 24 * HOUR_S * fmean(1 / job.step_s(seconds) for seconds in hourly_s)
    middle_s = played[len(played) // 2][1].seconds
    draws = [steps * job.step_s(middle_s) / job.step_s(seconds) for seconds in others] if steps else []
    spread = mean_estimate([steps, *draws], 0.0)
    half = (spread.high - spread.low) / 2 if draws else 0.0
    estimate = Estimate(steps, max(0.0, steps - half), steps + half, 1 + len(draws))
    rollout_s = 1 / speed if (speed := fmean(1 / seconds for seconds in hourly_s)) else math.inf
    return CurvePoint(
        workers * fleet.degree, workers, estimate, rollout_s, 24 * HOUR_S / steps if steps else math.inf,
        fmean(one.borrowed_share for _, one in played),
    )  # fmt: skip


def _levels(results: Sequence[WindowResult]) -> list[list[WindowResult]]:
    """Return windows of up to three levels of lending, the level's mean lent share first in each."""
    groups: list[list[WindowResult]] = []
    for place in LEVELS:
        group = at_level(results, place, min(TIMELINES_MAX, len(results)))
        mean = fmean(result.lent_share for result in group)
        group.sort(key=lambda result: abs(result.lent_share - mean))
        if not groups or abs(group[0].lent_share - groups[-1][0].lent_share) > LEVELS_APART:
            groups.append(group)
    return groups


def _play(
    fleet: Fleet, batch: Sequence[PlannedTrajectory], level: Sequence[WindowResult], workers: int, shrink: int
) -> RolloutRun:
    usable = [result.timeline for result in level if max(result.timeline.kv_tokens) > 0 and result.timeline.lent_s > 0]
    borrowed = round(workers / shrink) if usable else 0
    dedicated = fleet.dedicated // shrink
    if not dedicated and (not borrowed or fmean(t.lent_s / t.span_s for t in usable) < SHARE_MIN):
        return RolloutRun(math.inf, 0.0, 0)
    timelines = [_shifted(usable, number) for number in range(borrowed)]
    router = Router("cost", blocked_patience_s=GatewaySettings().gated_s)
    cluster = MeasuredCluster(router, fleet.rollout, dedicated, timelines, batch)
    result = cluster.run()
    own_s, borrowed_s = cluster.busy_s
    share = borrowed_s / (own_s + borrowed_s) if borrowed_s else 0.0
    return RolloutRun(result.completion_s, share, result.evictions)


def _shifted(usable: Sequence[LentTimeline], number: int) -> LentTimeline:
    line = usable[number % len(usable)]
    return line.shifted(line.span_s * (number // len(usable)) * 0.382 % line.span_s)


def _shrink(fleet: Fleet, job: RlJob) -> int:
    """Return the power of two by which workers and trajectories are reduced, so that a run takes seconds."""
    turns, by = sum(len(trajectory.turns) for trajectory in job.trajectories), 1
    while turns / by > TURNS_MAX and fleet.replicas % (2 * by) == 0 and fleet.dedicated % (2 * by) == 0:
        by *= 2
    return by


def _part(job: RlJob, shrink: int) -> tuple[PlannedTrajectory, ...]:
    """Return one of `shrink` parts of the batch, in whole groups."""
    return tuple(one for one in job.trajectories if int(one.group) % shrink == 0) if shrink > 1 else job.trajectories


def _alone_s(fleet: Fleet, trajectory: PlannedTrajectory) -> float:
    """Return the time of a trajectory with a worker to itself, decoding and environment only."""
    turns = trajectory.turns
    decode_s = sum(
        turn.output_tokens * fleet.rollout.step_s(step_shape(1, turn.prompt_tokens, 1)) + turn.env_s for turn in turns
    )
    return decode_s - turns[-1].env_s
