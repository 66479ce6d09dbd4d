"""Lower bounds of a batch's completion time: what a router that knew everything in advance could not beat."""

from __future__ import annotations

from collections.abc import Sequence

from rose.core.facts import StepFeatures
from rose.engines.profiles import StepProfile
from rose.sim.batch_cluster import PlannedTrajectory, PlannedTurn
from rose.sim.lent_timeline import SEQUENCES, STEP_TOKENS, LentTimeline


def lower_bound_s(
    profile: StepProfile, dedicated: int, timelines: Sequence[LentTimeline], trajectories: Sequence[PlannedTrajectory]
) -> float:
    """Return the larger of the longest trajectory alone and all work over all usable capacity.

    Work is priced as full batches of one kind; a mixed batch can be a little cheaper (`clairvoyant_s` is strict).
    """
    longest_s = max(alone_s(profile, turns) for turns in {trajectory.turns for trajectory in trajectories})
    work_s = sum(_work_s(profile, trajectory) for trajectory in trajectories)
    capacity = dedicated + sum(timeline.lent_s / timeline.span_s for timeline in timelines)
    return max(longest_s, work_s / capacity)


def clairvoyant_s(
    profile: StepProfile, dedicated: int, timelines: Sequence[LentTimeline], trajectories: Sequence[PlannedTrajectory]
) -> float:
    """Return the largest of four times that no router beats, whatever it knows in advance.

    They are the longest trajectory alone; all arithmetic, and all reads in the fewest steps, over all usable capacity;
    and the memory-time of all trajectories over all memory: each turn's context while it decodes alone.
    """
    longest_s = max(alone_s(profile, turns) for turns in {trajectory.turns for trajectory in trajectories})
    capacity = dedicated + sum(timeline.lent_s / timeline.span_s for timeline in timelines)
    kv_tokens = dedicated * (profile.kv_memory_bytes // profile.kv_bytes_per_token)
    kv_tokens += sum(max(timeline.kv_tokens) for timeline in timelines)
    compute_s = sum(_compute_s(profile, trajectory.turns) for trajectory in trajectories)
    reads_s = sum(_reads_s(profile, trajectory.turns) for trajectory in trajectories)
    memory_s = sum(_memory_time(profile, trajectory.turns) for trajectory in trajectories)
    return max(longest_s, compute_s / capacity, reads_s / capacity, memory_s / kv_tokens)


def _compute_s(profile: StepProfile, turns: tuple[PlannedTurn, ...]) -> float:
    total_s, known = 0.0, 0
    for turn in turns:
        tokens = max(1, turn.prompt_tokens - known) + turn.output_tokens
        total_s += tokens * profile.per_new_token_s + turn.output_tokens * profile.per_sequence_s
        known = turn.prompt_tokens + turn.output_tokens
    return total_s


def _reads_s(profile: StepProfile, turns: tuple[PlannedTurn, ...]) -> float:
    step_s = (profile.weights_read_s + profile.fixed_s) / SEQUENCES
    read_s = profile.per_kv_read_token_s
    return sum(turn.output_tokens * (step_s + turn.prompt_tokens * read_s) for turn in turns)


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
