"""An episode: what its player asks, in which order, and what it was answered.

What it asks next is a function of its number and of the answers alone, so an episode is the same wherever its turns
ran and whatever happened to them on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rose.engines.base import Sampling, Span
from rose.rollout.sessions import Finish
from rose.sim.law import EOS, VOCABULARY


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn, as its client got it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]

    @property
    def versions(self) -> list[str]:
        """One per token."""
        return [span.version for span in self.spans for _ in range(span.start, span.end)]


SCRIPT_TOKENS = 6  # that an environment says between two turns


@dataclass(slots=True)
class Episode:
    """One trajectory, as its player knows it."""

    trajectory_id: str
    number: int
    turns: int
    seed: int
    sampling: Sampling
    asked: list[tuple[int, ...]] = field(default_factory=list)  # prompts, in order
    answers: list[tuple[int, ...]] = field(default_factory=list)
    is_vanishing: bool = False
    is_over: bool = False
    is_lost: bool = False

    def prompt(self) -> tuple[int, ...]:
        """All that was said, and what the environment says to it."""
        if not self.answers:
            return tuple(len(EOS) + (self.number >> shift) % 64 for shift in (0, 6, 12)) + (len(EOS),) * 5
        said = sum(self.answers[-1]) + len(self.answers)
        words = tuple(len(EOS) + (said * (index + 7)) % (VOCABULARY - len(EOS)) for index in range(SCRIPT_TOKENS))
        return self.asked[-1] + self.answers[-1] + words

    @property
    def is_streaming(self) -> bool:
        """Whether its player reads every token as it comes."""
        return self.number % 3 == 0

    @property
    def finish(self) -> Finish:
        reward = float(sum(map(sum, self.answers)) % 3)
        return Finish(reward, is_success=reward > 1)
