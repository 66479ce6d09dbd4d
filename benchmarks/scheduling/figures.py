"""Figures of a run: the keys of a row, and the lower bound of the completion time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.core.facts import StepFeatures
from rose.engines.profiles import StepProfile
from rose.sim.batch_cluster import BatchResult, PlannedTrajectory, PlannedTurn
from rose.sim.lent_timeline import STEP_TOKENS, LentTimeline


def row_of(result: BatchResult, bound_s: float) -> dict[str, Any]:
    turns = sorted(result.turn_s)
    return {
        "completion_s": round(result.completion_s, 1),
        "p95_trajectory_s": round(result.end_s[int(0.95 * (len(result.end_s) - 1))], 1),
        "turn_p99_s": round(turns[int(0.99 * (len(turns) - 1))], 2),
        "prefix_hit_ratio": round(result.cached_tokens / max(1, result.prompt_tokens), 4),
        "reprefilled_tokens": max(0, result.known_tokens - result.cached_tokens),
        "evictions": result.evictions,
        "idle_share": round(result.idle_s / max(1e-9, result.usable_s), 4),
        "over_lower_bound": round(result.completion_s / bound_s, 3),
        "borrowed_device_s": round(result.borrowed_s, 1),
    }


def lower_bound_s(
    profile: StepProfile, dedicated: int, timelines: Sequence[LentTimeline], trajectories: Sequence[PlannedTrajectory]
) -> float:
    """Return the larger of the longest trajectory alone and all work over all usable capacity."""
    longest_s = max(_alone_s(profile, turns) for turns in {trajectory.turns for trajectory in trajectories})
    work_s = sum(_work_s(profile, trajectory) for trajectory in trajectories)
    capacity = dedicated + sum(timeline.lent_s / timeline.span_s for timeline in timelines)
    return max(longest_s, work_s / capacity)


def _alone_s(profile: StepProfile, turns: tuple[PlannedTurn, ...]) -> float:
    total_s, known = 0.0, 0
    for number, turn in enumerate(turns):
        new = max(1, turn.prompt_tokens - known)
        context = turn.prompt_tokens + turn.output_tokens // 2
        total_s += new * _prompt_token_s(profile, turn.prompt_tokens)
        total_s += turn.output_tokens * profile.step_s(StepFeatures(1, context, context, 1))
        total_s += turn.env_s if number + 1 < len(turns) else 0.0
        known = turn.prompt_tokens + turn.output_tokens
    return total_s


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
