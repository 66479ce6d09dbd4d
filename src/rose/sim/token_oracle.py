"""The tokens of the simulated rollout model: a function of (seed, position, weights), and of nothing else.

So for every token of every trajectory it is known, without running anything, whether it is the one that a single
undisturbed engine with the reported weights samples. A worker that runs other weights than it reports, tokens that are
lost, duplicated or mixed up, and a turn that continued from the wrong position: all of them show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.engines.base import Sampling
from rose.engines.live_request import LiveRequest, Sampled
from rose.engines.profiles import StepProfile
from rose.engines.simulated import SimulatedEngine

VOCABULARY = 256
EOS = frozenset(range(8))  # one token in 32 ends a turn
_MASK = (1 << 64) - 1


def oracle_token(seed: int, position: int, weights: int) -> tuple[int, float]:
    """Return the token at this position and its log-probability."""
    bits = _mixed(_mixed(_mixed(seed & _MASK) ^ position) ^ weights)
    return bits % VOCABULARY, -4.0 * (bits >> 11) / (1 << 53)


def is_complete_answer(answer: Sequence[int], sampling: Sampling) -> bool:
    """Return whether the answer ends here: at its first end token, or at its length limit."""
    ends = [index for index, token_id in enumerate(answer) if token_id in EOS]
    return ends == [len(answer) - 1] if ends else len(answer) == sampling.max_tokens


def _mixed(bits: int) -> int:
    """Return the finaliser of splitmix64, by Steele, Lea and Flood."""
    bits = (bits + 0x9E3779B97F4A7C15) & _MASK
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)


class LawfulEngine(SimulatedEngine):
    """An engine whose `weights` are what it runs, and whose version is what it reports."""

    def __init__(self, profile: StepProfile, **options: Any) -> None:
        super().__init__(profile, vocabulary=VOCABULARY, eos_token_ids=EOS, **options)
        self.weights = 0
        self.weights_bytes = 0

    def release_weights(self) -> None:
        """Do nothing: simulated weights take no memory."""

    def _draw(self, live: LiveRequest) -> Sampled:
        return Sampled(*oracle_token(live.request.sampling.seed, len(live.token_ids), self.weights))
