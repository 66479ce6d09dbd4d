"""What happened, as frozen values: the only thing the core's decisions are made from."""

from __future__ import annotations

import math
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


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request without its first token yet. `tokens_left` of its prompt are still to be computed."""

    arrival_s: float
    tokens_left: int


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that is decoding. `last_token_s` is when its newest token was made."""

    last_token_s: float
    context_tokens: int
    arrival_s: float = math.inf


@dataclass(frozen=True, slots=True)
class ServingView:
    """Everything about a device's serving side that lending is decided from.

    `number` grows by one per view. The last step's shape and duration are for learning what steps cost;
    `kv_used_bytes` counts what requests hold, not what is only cached.
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
        """Of all requests that are here; infinite without any."""
        waiting = [request.arrival_s for request in self.waiting]
        return min(waiting + [request.arrival_s for request in self.running], default=math.inf)


@dataclass(frozen=True, slots=True)
class RolloutView:
    """What rollouts could run now: sequences that decode, and prompt tokens waiting to be computed.

    `context_tokens` is the mean context of the sequences that decode.
    """

    decoding: int = 0
    prompt_tokens: int = 0
    context_tokens: int = 0
    oldest_arrival_s: float = math.inf


@dataclass(frozen=True, slots=True)
class LendingAsked:
    """Both sides of a device at the moment of a decision on lending."""

    serving: ServingView
    rollout: RolloutView


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A job goes on behind this step: whatever was said before of `next_group` and later ones counts no more.

    Nor what was said of `outstanding`: no step has learnt from them, and they are drawn again.
    """

    step: int
    next_group: int
    outstanding: tuple[int, ...] = ()
