"""One trajectory as the trainer receives it: every token of an episode and its provenance.

The tokens are those that went through the rollout model, never re-tokenised text. For each token the record holds
whether the model generated it (only those carry a loss), its log-probability and its weight version. So a trainer knows
the age of every part of a trajectory, even within one turn.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_VERSION = ""
"""The version of tokens that the model did not generate: prompts and observations."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The tokens of one episode and its reward. The four sequences have one entry per token."""

    trajectory_id: str
    group_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[str, ...]
    reward: float
    is_success: bool = False
    turns: int = 0
    invalid_turns: int = 0

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.logprobs), len(self.versions)}
        assert len(lengths) == 1, f"trajectory {self.trajectory_id} has sequences of lengths {sorted(lengths)}"

    @property
    def generated_tokens(self) -> int:
        """Return how many tokens the model generated."""
        return sum(self.loss_mask)

    def versions_used(self) -> tuple[str, ...]:
        """Return each version that generated part of it, once, in order of appearance."""
        return tuple(dict.fromkeys(version for version in self.versions if version != NO_VERSION))
