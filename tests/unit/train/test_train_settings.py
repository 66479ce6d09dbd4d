"""Settings of the trainer that do not go together, and the names of losses."""

from __future__ import annotations

import pytest

from rose.config.loading import load_settings
from rose.errors import ConfigError
from rose.train.losses import LOSSES
from rose.train.train_settings import LossSettings, TrainSettings, check_train


@pytest.mark.parametrize(
    "overrides, word",
    [
        (["overlong_buffer_tokens=5"], "overlong_tokens"),
        (["loss.sequence_importance_min=0.9", "loss.sequence_importance_max=0.5"], "every sequence"),
        (["loss.sequence_importance_max=0.5"], "every sequence"),
    ],
)
def test_settings_that_do_not_go_together(overrides, word):
    with pytest.raises(ConfigError, match=word):
        check_train(load_settings(TrainSettings, overrides=overrides))


def test_a_loss_is_one_of_the_table():
    for name in LOSSES:
        assert load_settings(LossSettings, overrides=[f"name={name}"]).name == name
    with pytest.raises(ConfigError, match="one of grpo, dapo, gspo, cispo"):
        load_settings(LossSettings, overrides=["name=ppo"])
