"""What one step of learning did, in figures: the line that is written down, and the sums it is made from.

Shares and means are over the trained tokens. The *gap* is how far apart trainer and engine are on the same token, in
nats: near 0 with the same weights, and the first thing to look at when a job does not learn. A token is as *stale* as
there are versions between the weights it was drawn with and those that learn from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rose.core.staleness import version_number
from rose.core.trajectory import Trajectory
from rose.train.losses import LossResult

Verdict = Literal["updated", "spike", "not_finite", "starved", "rolled_back"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. Shares are of the trained tokens; of a step that trained nothing they are 0."""

    step: int
    verdict: Verdict
    groups_kept: int
    groups_total: int
    trajectories: int = 0
    trajectories_refused: int = 0  # with log-probabilities that are no numbers
    trajectories_overlong: int = 0  # that lost reward for their length
    trained_tokens: int = 0
    computed_tokens: int = 0  # context and padding included
    loss: float = 0.0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    entropy: float = 0.0
    importance_mean: float = 0.0
    truncated_share: float = 0.0
    left_out_share: float = 0.0
    clipped_share: float = 0.0
    drifted_share: float = 0.0
    logprob_gap_mean: float = 0.0
    logprob_gap_max: float = 0.0
    rollout_kl: float = 0.0  # of the trainer from what was drawn from
    reference_kl: float = 0.0  # of the model from the one the job began with, where the loss looks at it
    staleness_mean: float | None = None  # None where versions are no numbers
    staleness_max: int | None = None
    tokens_by_version: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Sums:
    """Over the micro-batches of one update."""

    loss: float = 0.0
    entropy: float = 0.0
    importance: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    rollout_divergence: float = 0.0
    reference_divergence: float = 0.0
    truncated: int = 0
    left_out: int = 0
    clipped: int = 0
    drifted: int = 0
    trained_tokens: int = 0
    computed_tokens: int = 0

    def add(self, result: LossResult, entropy: float, trained_tokens: int, computed_tokens: int) -> None:
        self.loss += float(result.value.detach())
        self.entropy += entropy
        self.importance += result.importance_sum
        self.gap += result.gap_sum
        self.gap_max = max(self.gap_max, result.gap_max)
        self.rollout_divergence += result.rollout_divergence_sum
        self.reference_divergence += result.reference_divergence_sum
        self.truncated += result.truncated
        self.left_out += result.left_out
        self.clipped += result.clipped
        self.drifted += result.drifted
        self.trained_tokens += trained_tokens
        self.computed_tokens += computed_tokens

    def shown(self) -> dict[str, Any]:
        """The fields of a report that come from here."""
        tokens = max(1, self.trained_tokens)
        return {
            "trained_tokens": self.trained_tokens,
            "computed_tokens": self.computed_tokens,
            "loss": self.loss,
            "entropy": self.entropy / tokens,
            "importance_mean": self.importance / tokens,
            "truncated_share": self.truncated / tokens,
            "left_out_share": self.left_out / tokens,
            "clipped_share": self.clipped / tokens,
            "drifted_share": self.drifted / tokens,
            "logprob_gap_mean": self.gap / tokens,
            "logprob_gap_max": self.gap_max,
            "rollout_kl": self.rollout_divergence / tokens,
            "reference_kl": self.reference_divergence / tokens,
        }


def tokens_by_version(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    written = Counter[str]()
    for trajectory in trajectories:
        written.update(version for version in trajectory.versions if version)
    return dict(written)


def staleness(written: Mapping[str, int], version: str | None = None) -> tuple[float | None, int | None]:
    """Versions behind, mean over tokens and at most; behind `version`, or the newest there is. None if unknown.

    The name of a version begins with its number: `12`, or `12-` and a hash.
    """
    numbers = {name: version_number(name) for name in [*written, *([version] if version else [])]}
    if not written or any(number is None for number in numbers.values()):
        return None, None
    known = {name: number for name, number in numbers.items() if number is not None}
    newest = known[version] if version else max(known.values())
    behind = {name: max(0, newest - known[name]) for name in written}
    mean = sum(behind[name] * tokens for name, tokens in written.items()) / sum(written.values())
    return mean, max(behind.values())
