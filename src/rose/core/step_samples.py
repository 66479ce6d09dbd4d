"""Samples of the steps that an engine ran: enough to fit a step profile, in bounded memory.

Two samples answer two questions. The newest steps of every region of shapes say what each shape costs, however rare it
is. A uniform draw from all steps says how far steps scatter about that, with the rare long ones. Keeping both takes a
microsecond a step.
"""

from __future__ import annotations

import random
from collections import deque

from rose.core.facts import StepFeatures
from rose.core.latency import REGIONS_MAX, Sample, region_of

NEWEST_PER_REGION = 8
DRAWN_MAX = 2048  # of which the slowest twenty are the last 1 %


class StepSamples:
    """The samples of one engine; the same steps give the same samples."""

    def __init__(self) -> None:
        self.seen = 0
        self._newest: dict[tuple[int, int, int], deque[Sample]] = {}
        self._drawn: list[Sample] = []
        self._chance = random.Random(0)

    def add(self, features: StepFeatures, seconds: float) -> None:
        """Keep a step of the engine's work; an empty one is none."""
        if not self.add_shape(features, seconds):
            return
        self.seen += 1
        if len(self._drawn) < DRAWN_MAX:
            self._drawn.append((features, seconds))
        elif (place := int(self._chance.random() * self.seen)) < DRAWN_MAX:
            self._drawn[place] = (features, seconds)

    def add_shape(self, features: StepFeatures, seconds: float) -> bool:
        """Keep a step that says what its shape costs, and is no part of the work: one of a start-up profile."""
        if features.sequences == 0 or seconds <= 0:
            return False
        key = region_of(features)
        newest = self._newest.get(key)
        if newest is None:
            if len(self._newest) >= REGIONS_MAX:
                del self._newest[next(iter(self._newest))]
            newest = self._newest[key] = deque(maxlen=NEWEST_PER_REGION)
        newest.append((features, seconds))
        return True

    @property
    def shapes(self) -> list[Sample]:
        return [sample for newest in self._newest.values() for sample in newest]

    @property
    def drawn(self) -> list[Sample]:
        return list(self._drawn)
