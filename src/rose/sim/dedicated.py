"""A dedicated rollout worker in virtual time: one engine that runs whenever it has something to run."""

from __future__ import annotations

import random

from rose.engines.base import Budget, StepPlan
from rose.sim.gate import Gate
from rose.sim.handle import SimulatedHandle
from rose.sim.law import LawfulEngine
from rose.sim.profiles import ROLLOUT_SLOWER, slowed

WIDE = Budget(512, 64)


class DedicatedDevice(SimulatedHandle):
    def __init__(self, agents_gate: Gate, chance: random.Random, kv_blocks: int) -> None:
        self._chance, self._kv_blocks = chance, kv_blocks
        self._plan: StepPlan | None = None
        self._step_s = 0.0
        self.slower = 1.0  # than it should be
        super().__init__(agents_gate)

    def _fresh(self) -> LawfulEngine:
        return LawfulEngine(slowed("cpu-frozenlake-1m", ROLLOUT_SLOWER), kv_blocks=self._kv_blocks)

    def _next_step(self, now_s: float) -> float | None:
        self._plan = self.engine.plan(WIDE)
        if self._plan is None:
            return None
        self._step_s = self.slower * self.engine.cost_s(self._plan) * self._chance.lognormvariate(0, 0.05)
        return self._step_s

    def _end_step(self, now_s: float) -> None:
        assert self._plan is not None
        self.tell(self.engine.step(self._plan), self._plan.features.new_tokens, self._step_s)
