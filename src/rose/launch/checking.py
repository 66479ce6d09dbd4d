"""What is sure to fail is said before anything is started: no folder is made, no device waits for a run that ends."""

from __future__ import annotations

from rose.envs.registry import make_environment
from rose.launch.publishing import given_secret
from rose.launch.settings import RunSettings
from rose.launch.vllm_cast import check as check_vllm
from rose.models.folder import load_model_folder
from rose.train.recipes import find_recipe


def check_start(settings: RunSettings) -> None:
    """Raises ConfigError, ModelError.

    For an extra that is not installed, no model to begin with, a folder that is none, a relay without its secret.
    """
    make_environment(settings.environment, **settings.environment_options).close()
    check_vllm(settings)
    given_secret(settings.weights)
    if settings.rollout_model is not None:
        load_model_folder(settings.rollout_model)
    else:
        find_recipe(settings.environment)
