"""What happened, as frozen values: the only thing the core's decisions are made from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The shape of one engine step, which is all that its duration is predicted from.

    `kv_read_tokens` sums, over the step's requests, the cached tokens each of them attends to;
    `new_by_context` sums new tokens x the tokens in front of them, the quadratic part of a prefill.
    """

    new_tokens: int = 0
    kv_read_tokens: int = 0
    new_by_context: int = 0
    sequences: int = 0
