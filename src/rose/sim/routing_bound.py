"""Lower bounds of a batch's completion time: what a router that knew everything in advance could not beat."""

from __future__ import annotations

from collections.abc import Sequence

from rose.core.facts import StepFeatures
from rose.engines.profiles import StepProfile
from rose.sim.batch_cluster import PlannedTrajectory, PlannedTurn
from rose.sim.lent_timeline import STEP_TOKENS, LentTimeline


def lower_bound_s(
    profile: StepProfile, dedicated: int, timelines: Sequence[LentTimeline], trajectories: Sequence[PlannedTrajectory]
) -> float:
    """Return the largest of three times that no router beats.

    They are the longest trajectory alone, all work over all usable capacity, and the memory-time of all trajectories
    over all memory: while a trajectory decodes at the speed of a worker of its own, its context is held.
    """
    longest_s = max(alone_s(profile, turns) for turns in {trajectory.turns for trajectory in trajectories})
    work_s = sum(_work_s(profile, trajectory) for trajectory in trajectories)
    capacity = dedicated + sum(timeline.lent_s / timeline.span_s for timeline in timelines)
    kv_tokens = dedicated * (profile.kv_memory_bytes // profile.kv_bytes_per_token)
    kv_tokens += sum(max(timeline.kv_tokens) for timeline in timelines)
    memory_s = sum(_memory_time(profile, trajectory.turns) for trajectory in trajectories) / kv_tokens
    return max(longest_s, work_s / capacity, memory_s)


def alone_s(profile: StepProfile, turns: tuple[PlannedTurn, ...]) -> float:
    """Return the time of a trajectory with a worker to itself, environments included."""
    total_s, known = 0.0, 0
    for number, turn in enumerate(turns):
        new = max(1, turn.prompt_tokens - known)
        context = turn.prompt_tokens + turn.output_tokens // 2
        total_s += new * _prompt_token_s(profile, turn.prompt_tokens)
        total_s += turn.output_tokens * profile.step_s(StepFeatures(1, context, context, 1))
        total_s += turn.env_s if number + 1 < len(turns) else 0.0
        known = turn.prompt_tokens + turn.output_tokens
    return total_s


def _memory_time(profile: StepProfile, turns: tuple[PlannedTurn, ...]) -> float:
    """Return KV tokens times seconds: each turn's context while it decodes alone."""
    contexts = [(turn.prompt_tokens + turn.output_tokens // 2, turn.output_tokens) for turn in turns]
    return sum(tokens * profile.step_s(StepFeatures(1, context, context, 1)) * context for context, tokens in contexts)


def _work_s(profile: StepProfile, trajectory: PlannedTrajectory) -> float:
    """Return the seconds of a worker that computes nothing twice, in full batches and with enough memory."""
    kv_tokens, total_s, known = profile.kv_memory_bytes // profile.kv_bytes_per_token, 0.0, 0
    for turn in trajectory.turns:
        context = turn.prompt_tokens + turn.output_tokens // 2
        batch = max(1, min(64, kv_tokens // context))
        step_s = profile.step_s(StepFeatures(batch, batch * context, batch * context, batch))
        total_s += max(1, turn.prompt_tokens - known) * _prompt_token_s(profile, turn.prompt_tokens)
        total_s += turn.output_tokens * step_s / batch
        known = turn.prompt_tokens + turn.output_tokens
    return total_s


def _prompt_token_s(profile: StepProfile, prompt_tokens: int) -> float:
    depth = prompt_tokens // 2
    features = StepFeatures(STEP_TOKENS, depth + STEP_TOKENS, STEP_TOKENS * depth, 1)
    return profile.step_s(features) / STEP_TOKENS
