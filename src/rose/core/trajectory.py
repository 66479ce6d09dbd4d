"""One trajectory as it is learnt from: every token of an episode, and what was known when it was written.

The tokens are the ones that went through the rollout model, never text that was tokenised again. Of each the record
says whether the model wrote it (only those carry a loss), with which log-probability, and under which version of the
weights, so that a trainer can tell how old a piece of a trajectory is, even within one turn.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_VERSION = ""
"""Of tokens the model did not write: prompts and observations."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The four sequences have one entry per token."""

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
        return sum(self.loss_mask)

    def versions_used(self) -> tuple[str, ...]:
        """Each version that wrote part of it, once, in order of appearance."""
        return tuple(dict.fromkeys(version for version in self.versions if version != NO_VERSION))
