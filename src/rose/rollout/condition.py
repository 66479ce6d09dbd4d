"""What an agent says of its device: who it is when it joins, and how it is from then on.

A device that is lent says more than its engine does: whether its owner offers it, where the rollout model is, what
serving can spare. A gate that the owner, the circuit breaker or an empty schedule has shut is told as not open, with
the reason, so that nobody offers turns that would only be refused.

A gate that serving has shut for the moment is told by how long it has been shut. The device said so when it was last
asked; since then time has passed, which counts, unless it has made a step, which opened the gate, or so much that its
word means nothing any more: a device that hangs must not pass for one that waits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from rose.coserve.messages import LendingStatus
from rose.rollout.messages import Beat, Join, Kind, Place
from rose.rollout.rates import Rates
from rose.rollout.runner import AgentEngine

OFFERED = ("lending", "parked", "activating")
SECONDS_MIN = 0.05  # a rate over less is noise
WORD_S_MAX = 5.0  # a device is asked every beat; who has not answered for so long does not just run a long step


class Condition:
    """One per connection to the gateway. `hash` tells that of the weights that run, as far as it is known."""

    def __init__(self, engine: AgentEngine, rates: Rates, hash_: Callable[[], str], now_s: float) -> None:
        self._engine, self._rates, self._hash = engine, rates, hash_
        self._tokens, self._at_s, self._rate = engine.facts.generated_tokens, now_s, 0.0
        self._heard: tuple[float, int] | None = None  # when the device last spoke of lending, after so many steps

    def heard(self, now_s: float) -> None:
        """The device has just said how it is lent."""
        self._heard = now_s, self._engine.facts.steps

    def beat(self, now_s: float) -> Beat:
        facts, status, why = self._engine.facts, self._engine.lending_status, self._why_shut()
        return Beat(
            running=facts.running,
            waiting=facts.waiting,
            kv_used_tokens=facts.kv_blocks_used * facts.block_tokens,
            kv_tokens=facts.kv_blocks_limit * facts.block_tokens,
            version=facts.version,
            gate_open=not why,
            tokens_per_s=self._measured(facts.generated_tokens, now_s),
            why=why,
            hash=self._hash(),
            prefill_tok_s=self._rates.prefill_tok_s,
            decode_tok_s=self._rates.decode_tok_s,
            slack_s=status.slack_s if status is not None else None,
            kv_use=status.serving_pages / max(1, status.pages) if status is not None else None,
            place=place_of(status),
            is_offered=is_offered(status),
            activation_s=status.activation_s if status is not None else None,
            can_park=status is not None,
            shut_s=self._shut_s(now_s),
        )

    def _shut_s(self, now_s: float) -> float | None:
        status = self._engine.lending_status
        shut_s = status.shut_s if status is not None else None
        if shut_s is None or self._heard is None:
            return shut_s
        heard_s, steps = self._heard
        age_s = max(0.0, now_s - heard_s)
        return shut_s + age_s if age_s <= WORD_S_MAX and self._engine.facts.steps == steps else None

    def _measured(self, tokens: int, now_s: float) -> float:
        """Since the beat before, unless that was just now, or a clock says that it is still to come."""
        seconds = now_s - self._at_s
        if not 0 <= seconds < SECONDS_MIN:
            self._rate = max(0, tokens - self._tokens) / seconds if seconds > 0 else 0.0
            self._tokens, self._at_s = tokens, now_s
        return self._rate

    def _why_shut(self) -> str:
        trouble, status = self._engine.trouble, self._engine.lending_status
        if trouble is not None:
            return trouble.what
        if status is None or (status.state == "lending" and not status.is_resting):
            return ""
        return status.why or f"it is {status.state}"


def join_of(engine: AgentEngine, name: str, kind: Kind, model: str, seats: int, weights_hash: str) -> Join:
    facts, status = engine.facts, engine.lending_status
    return Join(
        name=name or f"{socket.gethostname()}-{os.getpid()}",
        kind=kind,
        model=model,
        version=facts.version,
        seats=seats,
        kv_tokens=facts.kv_blocks_limit * facts.block_tokens,
        context_tokens=facts.max_context_tokens,
        hash=weights_hash,
        place=place_of(status),
        is_offered=is_offered(status),
    )


def place_of(status: LendingStatus | None) -> Place:
    if status is None:
        return "resident"
    return "activating" if status.state == "activating" else status.model


def is_offered(status: LendingStatus | None) -> bool:
    """By the owner, whatever else keeps it from taking turns."""
    return status is None or status.state in OFFERED
