"""The RL job of a plan: its batch, the lengths of its trajectories, and the time of everything but the rollouts.

`grpo:1024x16,turns=alfworld` is a step of 1,024 trajectories in groups of 16. Lengths are drawn from quantiles of a
public source (tasks.json names it, and what was assumed beyond it). The likeness of a group's members is a Gaussian
copula over the number of turns. The trainer takes 6 x parameters x tokens FLOPs at the stated utilisation, unless its
seconds are given; a version is sent once to the relay, and each worker fetches it over a link of its own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from rose.bounds import UNREADABLE, Count, Label, NonNegative, Seconds, Share, Text
from rose.errors import ConfigError
from rose.plan.fleet import Fleet
from rose.sim.batch_cluster import PlannedTrajectory, PlannedTurn
from rose.sim.step_costs import sync_s, training_s

TASKS_FILE = Path(__file__).parent / "tasks.json"
PLACES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)  # of the quantiles in the file
TURNS_MAX = 200
BATCH_MAX = 65_536
TURNS_OF_STEP_MAX = 250_000  # more take minutes to simulate, many times

Quantiles = Annotated[tuple[NonNegative, ...], Meta(min_length=len(PLACES), max_length=len(PLACES))]
Positive = Annotated[float, Meta(gt=0, le=1e6)]
ShareAboveZero = Annotated[float, Meta(gt=0, le=1)]


class TaskLengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What trajectories of a task look like, as quantiles; `failed_turns` of those that fail, 0 if they are alike."""

    turns: Quantiles
    failed_turns: Count
    first_prompt_tokens: Quantiles
    output_tokens: Quantiles
    added_tokens: Quantiles  # to the prompt after each turn, besides the answer
    env_s: Quantiles
    source: Text
    assumed: Text


Tasks = Annotated[dict[Label, TaskLengths], Meta(max_length=64)]


class JobInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job as `--job` has it."""

    algorithm: Literal["grpo", "dapo"] = "grpo"
    batch: Annotated[int, Meta(ge=1, le=BATCH_MAX)] = 1024
    group: Annotated[int, Meta(ge=1, le=1024)] = 16
    turns: Label = "alfworld"
    oversample: Annotated[float, Meta(ge=1, le=16)] = 1.0  # rollouts per judged trajectory
    accept: ShareAboveZero = 0.5
    likeness: Share = 0.5
    mfu: ShareAboveZero = 0.4
    train_s: Seconds | None = None
    link_gbps: Positive = 200.0
    delta: ShareAboveZero = 0.1  # bytes sent, of all the bytes of the weights
    overlap: Literal["no", "yes"] = "no"  # trainer and rollouts at the same time


@dataclass(frozen=True, slots=True)
class RlJob:
    """A job on a fleet, with the times that do not depend on lending."""

    inputs: JobInputs
    task: TaskLengths
    trajectories: tuple[PlannedTrajectory, ...]
    train_s: float
    sync_s: float
    sync_bytes: int  # to one worker

    def step_s(self, rollout_s: float) -> float:
        other_s = self.train_s + self.sync_s
        return max(rollout_s, other_s) if self.inputs.overlap == "yes" else rollout_s + other_s

    @property
    def output_tokens(self) -> int:
        return sum(trajectory.output_tokens for trajectory in self.trajectories)

    @property
    def context_tokens(self) -> int:
        """Return the context of a turn half through its answer, on average over turns."""
        turns = [turn for trajectory in self.trajectories for turn in trajectory.turns]
        return max(1, sum(turn.prompt_tokens + turn.output_tokens // 2 for turn in turns) // len(turns))


@cache
def tasks() -> dict[str, TaskLengths]:
    return msgspec.json.decode(TASKS_FILE.read_bytes(), type=Tasks)


def job_inputs(text: str) -> JobInputs:
    """Return a job from text as `grpo:1024x16,turns=alfworld`; raises ConfigError in words."""
    hint = "write it as grpo:1024x16,turns=alfworld (1,024 trajectories a step in groups of 16)"
    head, *rest = text.split(",")
    algorithm, _, size = head.partition(":")
    values: dict[str, object] = {"algorithm": algorithm.strip()}
    if size:
        batch, _, group = size.partition("x")
        if not (batch.isdigit() and group.isdigit() and len(size) < 16):
            raise ConfigError(f"`{size}` is no batch", hint=hint)
        values |= {"batch": int(batch), "group": int(group)}
    numbers = {"oversample", "accept", "likeness", "mfu", "train_s", "link_gbps", "delta"}
    for part in rest:
        key, equals, value = part.strip().partition("=")
        if not equals or key not in {*numbers, "turns", "overlap"}:
            raise ConfigError(
                f"`{part}` is no part of a job", hint=f"known: turns, overlap, {', '.join(sorted(numbers))}"
            )
        try:
            values[key] = float(value) if key in numbers else value
        except ValueError:
            raise ConfigError(f"job: {key} is `{value}`, not a number", hint=hint) from None
    try:
        inputs = msgspec.convert(values, JobInputs)
    except UNREADABLE as error:
        raise ConfigError(f"this is no job: {error}", hint=hint) from error
    if inputs.turns not in tasks():
        what = f"there are no trajectory lengths for `{inputs.turns}`"
        raise ConfigError(what, hint=f"known: {', '.join(tasks())}")
    return inputs


def job_on(fleet: Fleet, inputs: JobInputs, seed: int) -> RlJob:
    """Return the job on this fleet, with one drawn batch."""
    task = tasks()[inputs.turns]
    if (turns := inputs.batch * inputs.oversample * max(task.turns[3], task.failed_turns / 2)) > TURNS_OF_STEP_MAX:
        what = f"a step of {inputs.batch:,} trajectories has about {turns:,.0f} turns: too many to simulate"
        raise ConfigError(what, hint="plan for a part: a smaller batch, --dedicated and --devices in proportion")
    drawn = draw(task, inputs, fleet.rollout.max_context_tokens, seed)
    parameters = fleet.rollout_weights_bytes / 2
    tokens = sum(one.turns[-1].prompt_tokens + one.turns[-1].output_tokens for one in drawn) / inputs.oversample
    if inputs.train_s is not None:
        train_s = inputs.train_s
    elif fleet.train_devices:
        train_s = training_s(parameters, tokens, fleet.train_devices, fleet.accelerator.compute_flops, inputs.mfu)
    else:
        what = "without --train-gpus the time of a training step is not known"
        raise ConfigError(what, hint="give --train-gpus, or the seconds: --job ...,train_s=120")
    sync_bytes = int(fleet.rollout_weights_bytes * inputs.delta)
    return RlJob(inputs, task, tuple(drawn), train_s, sync_s(sync_bytes, inputs.link_gbps), sync_bytes)


def draw(task: TaskLengths, inputs: JobInputs, context_tokens: int, seed: int) -> list[PlannedTrajectory]:
    """Draw the trajectories of one step; members of a group are alike in their number of turns."""
    chance, normal = random.Random(f"trajectories {seed}"), NormalDist()
    alike, apart = math.sqrt(inputs.likeness), math.sqrt(1 - inputs.likeness)
    drawn: list[PlannedTrajectory] = []
    for number in range(math.ceil(inputs.batch * inputs.oversample)):
        group, member = divmod(number, inputs.group)
        if member == 0:
            shared = chance.gauss(0, 1)
        place = normal.cdf(alike * shared + apart * chance.gauss(0, 1))
        turns = round(_quantile(task.turns, place))
        if task.failed_turns and chance.random() >= inputs.accept:
            turns = task.failed_turns
        drawn.append(PlannedTrajectory(f"{group}-{member}", str(group), _turns(task, turns, context_tokens, chance)))
    return drawn


def _turns(task: TaskLengths, count: int, context_tokens: int, chance: random.Random) -> tuple[PlannedTurn, ...]:
    """Return turns whose prompts are the conversation so far; a full context ends them."""
    turns: list[PlannedTurn] = []
    prompt = max(1, round(_quantile(task.first_prompt_tokens, chance.random())))
    for _ in range(max(1, min(TURNS_MAX, count))):
        if prompt >= context_tokens - 1:
            break
        output = max(1, min(round(_quantile(task.output_tokens, chance.random())), context_tokens - prompt))
        turns.append(PlannedTurn(prompt, output, _quantile(task.env_s, chance.random())))
        prompt += output + round(_quantile(task.added_tokens, chance.random()))
    return tuple(turns)


def _quantile(values: tuple[float, ...], place: float) -> float:
    return float(np.interp(place, PLACES, values))
