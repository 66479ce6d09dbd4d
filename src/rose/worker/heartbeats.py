"""What an agent reports of its device: the registration when it joins, heartbeats from then on, and measured rates.

A lent device also reports whether its owner offers it, where the rollout model is, and what serving can spare.
Admission that the owner, the circuit breaker or an empty schedule has closed is reported as not open, with the reason,
so that the gateway places no turns that would only be refused. Admission that serving blocks for the moment is reported
by how long it has been blocked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from rose.api.worker_messages import Heartbeat, Join, Kind, Residency, ServingReport
from rose.bounds import SECONDS_MAX
from rose.engines.base import EngineClient, LendingStatus, Stepped

OFFERED_STATES = ("lending", "parked", "activating")
SECONDS_MIN = 0.05  # a rate over less is noise
STATUS_S_MAX = 5.0  # a device is asked every heartbeat; no step is so long that an answer is this late

LENT_SHARE_S = 5.0  # over which the lent share is smoothed
WEIGHT = 0.05  # of the newest step in a rate
STEPS_MIN = 4  # fewer say nothing yet
PROMPT_TOKENS_MIN = 16
PROMPT_SHARE_MIN = 0.8  # of a step's tokens, for it to be a prompt's
GAP_STEPS_MAX = 3.0  # a gap counts for no more steps: a worker believed to be slow gets no turns to prove otherwise


class _Mean:
    """The mean of the newest values; its inverse is None before there are a few."""

    def __init__(self) -> None:
        self._value, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._count += 1
        self._value += (value - self._value) * max(WEIGHT, 1.0 / self._count)

    @property
    def inverse(self) -> float | None:
        return 1.0 / self._value if self._count >= STEPS_MIN and self._value > 0 else None


class Rates:
    """How quickly one device computes rollouts, by the times of its steps.

    Prompts are timed by the steps that hold little else. A sequence gets one token per step, and waits for what happens
    between two steps too: on a device that serves users that time is theirs.
    """

    def __init__(self) -> None:
        self._prompt_token_s, self._token_s = _Mean(), _Mean()
        self._ended_s: float | None = None  # the last step, if a sequence was running after it

    def observe(self, stepped: Stepped, now_s: float) -> None:
        before_s = self._ended_s
        self._ended_s = now_s if stepped.facts.running else None
        if stepped.step_tokens <= 0 or stepped.step_s <= 0:
            return
        sampled = sum(len(event.token_ids) for event in stepped.events)
        prompt_tokens = stepped.step_tokens - sampled
        if prompt_tokens >= max(PROMPT_TOKENS_MIN, PROMPT_SHARE_MIN * stepped.step_tokens):
            self._prompt_token_s.add(stepped.step_s / stepped.step_tokens)
        elif prompt_tokens <= 0:
            gap_s = now_s - before_s if before_s is not None else 0.0
            self._token_s.add(max(stepped.step_s, min(gap_s, GAP_STEPS_MAX * stepped.step_s)))

    @property
    def prefill_tok_s(self) -> float | None:
        return self._prompt_token_s.inverse

    @property
    def decode_tok_s(self) -> float | None:
        """The tokens per second of one sequence."""
        return self._token_s.inverse


class LentShare:
    """The share of the time that rollout steps ran on a lent device, smoothed over some seconds."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._before: tuple[float, float] | None = None

    def observe(self, lent_s: float, now_s: float) -> None:
        """Use the device's counter of lent time; one that fell began anew with its engine."""
        before = self._before
        if before is not None and now_s - before[1] < SECONDS_MIN:
            return
        self._before = lent_s, now_s
        if before is not None and lent_s >= before[0]:
            share = min(1.0, (lent_s - before[0]) / (now_s - before[1]))
            weight = min(1.0, (now_s - before[1]) / LENT_SHARE_S)
            self.share = share if self.share is None else self.share + (share - self.share) * weight


def serving_report(status: LendingStatus, lent_share: float | None) -> ServingReport:
    """Return what the gateway's operator sees of the device's users. Times that are not known are None."""
    times, breaches = status.serving, status.breaches
    has_times = times is not None and times.requests > 0
    return ServingReport(
        requests=times.requests if times is not None else 0,
        ttft_p50_s=_known(times.ttft_p50_s) if times is not None and has_times else None,
        ttft_p99_s=_known(times.ttft_p99_s) if times is not None and has_times else None,
        tpot_p50_s=_known(times.tpot_p50_s) if times is not None and has_times else None,
        tpot_p99_s=_known(times.tpot_p99_s) if times is not None and has_times else None,
        ttft_budget_s=_known(status.ttft_budget_s),
        tpot_budget_s=_known(status.tpot_budget_s),
        lent_share=_known(lent_share),
        counted=breaches.get("ttft", 0) + breaches.get("tpot", 0),
        ambiguous=breaches.get("ambiguous", 0),
        breaker_trips=status.breaker_trips,
        is_resting=status.is_resting,
    )


def _known(value: float | None) -> float | None:
    """Return a value that a message can hold, with the digits that people read."""
    return round(value, 5) if value is not None and 0 <= value <= SECONDS_MAX else None


class HeartbeatBuilder:
    """The heartbeats of one connection. `hash_` returns the hash of the running weights, as far as it is known."""

    def __init__(self, engine: EngineClient, rates: Rates, hash_: Callable[[], str], now_s: float) -> None:
        self._engine, self._rates, self._hash = engine, rates, hash_
        self._tokens, self._at_s, self._rate = engine.facts.generated_tokens, now_s, 0.0
        self._lent = LentShare()
        self._status_at: tuple[float, int] | None = None  # when the last lending status came, after so many steps

    def on_lending_status(self, now_s: float) -> None:
        self._status_at = now_s, self._engine.facts.steps
        status = self._engine.lending_status
        if status is not None:
            self._lent.observe(status.lent_s, now_s)

    def build(self, now_s: float) -> Heartbeat:
        facts, status, why = self._engine.facts, self._engine.lending_status, self._why_closed()
        return Heartbeat(
            running=facts.running,
            waiting=facts.waiting,
            kv_used_tokens=facts.kv_blocks_used * facts.block_tokens,
            kv_tokens=facts.kv_blocks_limit * facts.block_tokens,
            version=facts.version,
            gate_open=not why,
            tokens_per_s=self._tokens_per_s(facts.generated_tokens, now_s),
            why=why,
            hash=self._hash(),
            prefill_tok_s=self._rates.prefill_tok_s,
            decode_tok_s=self._rates.decode_tok_s,
            slack_s=status.slack_s if status is not None else None,
            kv_use=status.serving_pages / max(1, status.pages) if status is not None else None,
            place=_residency_of(status),
            is_offered=_is_offered(status),
            activation_s=status.activation_s if status is not None else None,
            can_park=status is not None,
            shut_s=self._blocked_s(now_s),
            serving=serving_report(status, self._lent.share) if status is not None else None,
        )

    def _blocked_s(self, now_s: float) -> float | None:
        """Return how long serving has blocked admission: what the device said, and the time since then.

        A step since then opened admission. A device that has not answered for long hangs, and must not pass for one
        that waits.
        """
        status = self._engine.lending_status
        blocked_s = status.shut_s if status is not None else None
        if blocked_s is None or self._status_at is None:
            return blocked_s
        reported_s, steps = self._status_at
        age_s = max(0.0, now_s - reported_s)
        return blocked_s + age_s if age_s <= STATUS_S_MAX and self._engine.facts.steps == steps else None

    def _tokens_per_s(self, tokens: int, now_s: float) -> float:
        """Return the rate since the last heartbeat, or the last rate if that was just now or lies in the future."""
        seconds = now_s - self._at_s
        if not 0 <= seconds < SECONDS_MIN:
            self._rate = max(0, tokens - self._tokens) / seconds if seconds > 0 else 0.0
            self._tokens, self._at_s = tokens, now_s
        return self._rate

    def _why_closed(self) -> str:
        trouble, status = self._engine.trouble, self._engine.lending_status
        if trouble is not None:
            return trouble.what
        if status is None or (status.state == "lending" and not status.is_resting):
            return ""
        return status.why or f"it is {status.state}"


def default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def join_of(engine: EngineClient, name: str, kind: Kind, model: str, max_concurrency: int, weights_hash: str) -> Join:
    """Return the registration of a device."""
    facts, status = engine.facts, engine.lending_status
    return Join(
        name=name or default_name(),
        kind=kind,
        model=model,
        version=facts.version,
        max_concurrency=max_concurrency,
        kv_tokens=facts.kv_blocks_limit * facts.block_tokens,
        context_tokens=facts.max_context_tokens,
        hash=weights_hash,
        place=_residency_of(status),
        is_offered=_is_offered(status),
    )


def _residency_of(status: LendingStatus | None) -> Residency:
    if status is None:
        return "resident"
    return "activating" if status.state == "activating" else status.model


def _is_offered(status: LendingStatus | None) -> bool:
    return status is None or status.state in OFFERED_STATES
