"""Settings of the trainer, apart from the code they control, so that reading settings does not load torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Literal

from rose.config.schema import setting
from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LossSettings:
    name: Literal["grpo", "dapo", "gspo", "cispo"] = setting("dapo", "grpo, dapo, gspo or cispo")
    clip_low: float = setting(0.2, "how far below 1 a token's ratio still counts", minimum=0, maximum=1)
    clip_high: float = setting(0.28, "how far above 1 a token's ratio still counts; grpo uses clip_low", minimum=0)
    sequence_clip_low: float = setting(3e-4, "gspo: how far below 1 a sequence's ratio counts", minimum=0, maximum=1)
    sequence_clip_high: float = setting(4e-4, "gspo: how far above 1 a sequence's ratio counts", minimum=0)
    weight_max: float = setting(5.0, "cispo: the most that a ratio weighs", minimum=1)
    importance_max: float = setting(2.0, "truncates trainer / rollout probability of a token", minimum=1)
    sequence_importance_min: float = setting(
        0.5, "sequences whose mean ratio is below are left out", minimum=0, maximum=1
    )
    sequence_importance_max: float = setting(
        2.0, "sequences whose mean ratio is above are left out; 0 keeps all", minimum=0
    )
    stops_drifted: bool = setting(
        True, "whether tokens that have left the clipping range since they were drawn are pushed no further; not cispo"
    )
    kl_beta: float = setting(0.0, "weight of the divergence from the model the job began with; 0 has none", minimum=0)
    kl_is_unbiased: bool = setting(True, "whether new / old probability weighs that divergence, for a right gradient")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    learning_rate: float = setting(3e-4, "of AdamW, after the warm-up", minimum=0, maximum=1)
    warm_up_steps: int = setting(3, "steps over which the learning rate grows to its value", minimum=0)
    gradient_norm_max: float = setting(0.5, "longer gradients are shortened to this", minimum=0)
    updates: int = setting(1, "updates per batch; more than one needs a forward pass more", minimum=1)
    temperature: float = setting(1.0, "of the rollouts; the trainer must use the same", minimum=0.01)
    advantage_scale: Literal["spread", "none"] = setting("spread", "what advantages are divided by")
    overlong_tokens: int = setting(0, "trajectories that wrote more lose reward; 0 has no such limit", minimum=0)
    overlong_buffer_tokens: int = setting(0, "how long before that limit the loss begins to grow", minimum=0)
    overlong_penalty: float = setting(1.0, "reward lost at the limit and beyond", minimum=0)
    rows_max: int = setting(16, "trajectories per micro-batch", minimum=1)
    tokens_max: int = setting(8192, "tokens per micro-batch, padding included", minimum=1)
    spike_factor: float = setting(10.0, "a gradient this many times the median is skipped", minimum=1)
    starved_steps_max: int = setting(5, "steps in a row without a group to learn from, before rolling back", minimum=1)
    roll_backs_max: int = setting(2, "roll-backs before a starved job stops; 0 stops at once", minimum=0)
    ranks: int = setting(1, "processes that share weights, gradients and batches (FSDP2)", minimum=1, maximum=4096)
    rank_patience_s: float = setting(300.0, "longest that ranks wait for one of them", minimum=1, maximum=86_400)
    model: Literal["own", "hf"] = setting("own", "whose forward pass is trained: own, or hf (transformers)")
    device: Literal["cpu", "cuda"] = setting("cpu", "what the trainer computes on; with cuda each rank has a GPU")
    precision: Literal["fp32", "bf16"] = setting("fp32", "of the arithmetic; weights and moments stay in fp32")
    gradient_checkpointing: bool = setting(False, "compute layers again in the backward pass, for less memory")
    loss: LossSettings = field(default_factory=LossSettings)

    @property
    def is_plain(self) -> bool:
        """Whether one process trains the built-in model in fp32 on a CPU."""
        chosen = self.ranks, self.model, self.device, self.precision, self.gradient_checkpointing
        return chosen == (1, "own", "cpu", "fp32", False)


def check_train(settings: TrainSettings) -> None:
    """Raise ConfigError for values that do not go together, and without what they need."""
    if settings.model == "hf" and find_spec("transformers") is None:
        hint = "pip install 'rose-rl[hf]', or set train.model=own"
        raise ConfigError("train.model is hf, and transformers is not installed", hint=hint)
    if settings.overlong_buffer_tokens > settings.overlong_tokens:
        raise ConfigError(
            f"train.overlong_buffer_tokens is {settings.overlong_buffer_tokens}, and the limit it leads to is "
            f"{settings.overlong_tokens}",
            hint="set train.overlong_tokens to the most tokens that a trajectory should write",
        )
    if 0 < settings.loss.sequence_importance_max <= settings.loss.sequence_importance_min:
        raise ConfigError(
            "train.loss.sequence_importance_max is not above sequence_importance_min: every sequence would be left out",
            hint="0.5 and 2 leave out what the trainer finds half or twice as likely, per token",
        )
