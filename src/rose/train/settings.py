"""Settings of the trainer, apart from the code they steer: who only reads settings need not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rose.config.schema import setting


@dataclass(frozen=True, slots=True)
class LossSettings:
    name: str = setting("dapo", "grpo or dapo")
    clip_low: float = setting(0.2, "how far below 1 a ratio still counts", minimum=0, maximum=1)
    clip_high: float = setting(0.28, "how far above 1 a ratio still counts; grpo uses clip_low", minimum=0)
    importance_max: float = setting(2.0, "truncates trainer / rollout probability", minimum=1)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    learning_rate: float = setting(3e-4, "of AdamW, after the warm-up", minimum=0, maximum=1)
    warm_up_steps: int = setting(3, "steps over which the learning rate grows to its value", minimum=0)
    gradient_norm_max: float = setting(0.5, "longer gradients are shortened to this", minimum=0)
    updates: int = setting(1, "updates per batch; more than one needs a forward pass more", minimum=1)
    temperature: float = setting(1.0, "of the rollouts; the trainer must use the same", minimum=0.01)
    advantage_scale: Literal["spread", "none"] = setting("spread", "what advantages are divided by")
    rows_max: int = setting(16, "trajectories per micro-batch", minimum=1)
    tokens_max: int = setting(8192, "tokens per micro-batch, padding included", minimum=1)
    spike_factor: float = setting(10.0, "a gradient this many times the median is skipped", minimum=1)
    starved_steps_max: int = setting(5, "steps in a row without a group to learn from, before rolling back", minimum=1)
    roll_backs_max: int = setting(2, "roll-backs before a starved job stops; 0 stops at once", minimum=0)
    loss: LossSettings = field(default_factory=LossSettings)
