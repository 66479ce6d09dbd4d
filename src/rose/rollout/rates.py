"""How quickly a device computes rollouts, from what its steps took.

Prompts are timed by the steps that hold little else. A sequence's own speed is one token per step, by the time from the
end of one step to the end of the next: on a device that serves users what lies between is theirs, and a turn waits for
it too. Newer steps count for more. A long gap says more of the moment than of the device, and a device that is believed
to be slow gets no turns by which it could show otherwise: so a gap counts for no more than a few steps.
"""

from __future__ import annotations

from rose.coserve.messages import Stepped

WEIGHT = 0.05  # of the newest step
STEPS_MIN = 4  # fewer say nothing yet
PROMPT_TOKENS_MIN = 16
PROMPT_SHARE_MIN = 0.8  # of a step's tokens, for it to be a prompt's
GAP_STEPS_MAX = 3.0


class _Mean:
    """Of the newest values; None before there are a few."""

    def __init__(self) -> None:
        self._value, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._count += 1
        self._value += (value - self._value) * max(WEIGHT, 1.0 / self._count)

    @property
    def inverse(self) -> float | None:
        return 1.0 / self._value if self._count >= STEPS_MIN and self._value > 0 else None


class Rates:
    """One per connection to the gateway. Show it every step; what did not say how long it took is skipped."""

    def __init__(self) -> None:
        self._prompt_token_s, self._token_s = _Mean(), _Mean()
        self._ended_s: float | None = None  # the step before, if something was running after it

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
        """Of one sequence."""
        return self._token_s.inverse
