"""Facts and grants: frozen values that say what happened, on which every decision depends, and what may run."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The shape of one engine step, from which its duration is predicted.

    `kv_read_tokens` sums, over the step's requests, the cached tokens each of them attends to;
    `new_by_context` sums new tokens times the tokens before them, the quadratic part of a prefill.
    """

    new_tokens: int = 0
    kv_read_tokens: int = 0
    new_by_context: int = 0
    sequences: int = 0


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request without its first token. `tokens_left` of its prompt are not computed yet."""

    arrival_s: float
    tokens_left: int


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that is decoding. `last_token_s` is the time of its newest token, the last of `tokens`.

    Without `first_token_s` it has no slack from earlier tokens.
    """

    last_token_s: float
    context_tokens: int
    arrival_s: float = math.inf
    first_token_s: float = -math.inf
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class ServingView:
    """The serving side of a device, as admission sees it.

    `number` grows by one per view. The last step's shape and duration calibrate the latency model. `kv_used_bytes`
    counts what requests hold, without the prefix cache.
    """

    number: int
    waiting: tuple[WaitingRequest, ...] = ()
    running: tuple[RunningRequest, ...] = ()
    kv_used_bytes: int = 0
    kv_total_bytes: int = 0
    last_step: StepFeatures = StepFeatures()
    last_step_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def oldest_arrival_s(self) -> float:
        """Return the earliest arrival of all requests; infinite without any."""
        waiting = [request.arrival_s for request in self.waiting]
        return min(waiting + [request.arrival_s for request in self.running], default=math.inf)


@dataclass(frozen=True, slots=True)
class RolloutView:
    """The rollout side of a device: decoding sequences, and prompt tokens that wait.

    `context_tokens` is the mean context of the sequences that decode.
    """

    decoding: int = 0
    prompt_tokens: int = 0
    context_tokens: int = 0
    oldest_arrival_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LendingAsked:
    """Both sides of a device at an admission decision."""

    serving: ServingView
    rollout: RolloutView


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A job resumes after this step. Earlier facts about `next_group` and later groups are void.

    Facts about `outstanding` groups are void too: no step has trained on them, and they are drawn again.
    """

    step: int
    next_group: int
    outstanding: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to run steps of at most this size until `until_s`; an expired grant permits nothing.

    A device that plans a step before it runs drops a plan whose upper estimate exceeds `step_s_max`.
    """

    tokens: int
    sequences: int
    until_s: float
    reason: str = ""
    step_s_max: float = math.inf

    def is_open(self, now_s: float) -> bool:
        return self.tokens > 0 and self.sequences > 0 and now_s < self.until_s
