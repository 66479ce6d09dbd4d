"""What a router knows and says: facts of workers and turns in, a place or the word to wait out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RouterKind = Literal["cost", "paper", "least", "sticky"]
ROUTER_KINDS: tuple[RouterKind, ...] = ("cost", "paper", "least", "sticky")
Outcome = Literal["ended", "evicted", "lost", "cancelled"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """Facts of one worker, as its agent and the pool know them. What was placed there, the router counts itself.

    `is_open` says that it takes turns: not draining, and its weights are those that turns may run on. `decode_tok_s` is
    for one sequence beside those that run there now; rates and slack that nobody told stay None. `gated_since_s` is
    when serving last shut the gate and has not opened it since, `opened_s` when it was last opened. Another `version`
    is an empty prefix cache.
    """

    name: str
    is_dedicated: bool = True
    is_open: bool = True
    seats: int = 1
    kv_tokens: int = 0
    closed_until_s: float = 0.0
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    slack_s: float | None = None
    gated_since_s: float | None = None
    version: str = ""
    opened_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnView:
    """Facts of a turn. Without a trajectory it is alone: nothing is cached for it, nothing follows it.

    `prompt_tokens` is all that must be in the KV cache before its next token: for a turn that goes on elsewhere, what
    it has produced too. `last_worker` is believed where the router has not placed the trajectory itself.
    """

    trajectory: str = ""
    group: str | None = None
    prompt_tokens: int = 0
    max_tokens: int = 0
    last_worker: str | None = None

    @property
    def tokens_max(self) -> int:
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Place:
    """Run the turn there. `predicted_s` is about how long it takes, waiting included."""

    worker: str
    reason: str
    predicted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """No worker now. Unless `is_for_all`, another waiting turn may still find one."""

    reason: str
    is_for_all: bool = True


@dataclass(frozen=True, slots=True)
class Stray:
    """A turn that should leave its worker: have it evicted, and place it anew."""

    turn_id: str
    worker: str
    reason: str
