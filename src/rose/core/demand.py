"""How much serving has to do, as a share of all it could do: what a busy clock cannot say.

A device that decodes one request is busy all the time and far from its limits; lent time between the tokens costs it
nothing, as requests that decode more slowly share more steps. So time is counted as work: a step with prompts as long
as it took, a decoded token as much as it would cost in a full batch. What waits counts too, since it will be work in a
moment. The past is forgotten exponentially, over the time that a first token may take: a queue that is gone by then
hurt nobody.
"""

from __future__ import annotations

import math

from rose.core.facts import StepFeatures
from rose.core.latency import LatencyModel


class Demand:
    """Tell it of every step of serving's; `level_s` over `window_s` is the share."""

    def __init__(self, model: LatencyModel, sequences: int, window_s: float) -> None:
        self.window_s = window_s
        self._model, self._sequences = model, sequences
        self._work_s = 0.0
        self._at_s = -math.inf

    def served(self, features: StepFeatures, seconds: float, end_s: float) -> None:
        self._work_s = self._left_s(end_s) + self._work_of(features, seconds)
        self._at_s = max(self._at_s, end_s)

    def level_s(self, waiting_s: float, now_s: float) -> float:
        """Work of about the last window, and of `waiting_s` that is still to be done."""
        return self._left_s(now_s) + waiting_s

    def _left_s(self, now_s: float) -> float:
        return self._work_s * math.exp(-max(0.0, now_s - self._at_s) / self.window_s)

    def _work_of(self, features: StepFeatures, seconds: float) -> float:
        decodes, most = features.sequences, self._sequences
        if features.new_tokens != decodes or decodes >= most:
            return seconds
        context = features.kv_read_tokens * most // max(1, decodes)
        full_s = self._model.predict(StepFeatures(most, context, context, most))
        return min(seconds, full_s * decodes / most)
