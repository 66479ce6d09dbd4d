"""Settings of `rose run`: profiles, layers, and everything that is refused with a word on what to do."""

from __future__ import annotations

import pytest

from rose.errors import ConfigError
from rose.run.run_settings import RunSettings, load_run_settings


def test_the_defaults_are_a_job_that_learns():
    settings = load_run_settings()
    assert (settings.environment, settings.groups.groups, settings.groups.size) == ("frozenlake", 8, 8)
    assert settings == RunSettings()


def test_a_profile_is_a_set_of_defaults_and_the_file_and_the_overrides_lie_over_it(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("profile: rollout-heavy\ngroups: {groups: 3}\n")
    settings = load_run_settings(file, ["steps=12", "train.learning_rate=0.001"])
    assert (settings.environment, settings.groups.size, settings.groups.train_size) == ("frozenlake-plan", 128, 8)
    assert (settings.groups.groups, settings.steps, settings.train.learning_rate) == (3, 12, 0.001)
    assert load_run_settings(None, ["profile=rollout-heavy"]).groups.groups == 2


def test_options_of_the_environment_come_from_the_file_and_the_overrides(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("environment: alfworld\nenvironment_options: {places: 5, view: full}\n")
    settings = load_run_settings(file, ["environment_options.places=9"])
    assert settings.environment_options == {"places": 9, "view": "full"}


def test_a_rollout_heavy_step_has_at_least_256_trajectories():
    groups = load_run_settings(None, ["profile=rollout-heavy"]).groups
    assert groups.groups * groups.size >= 256


@pytest.mark.parametrize(
    "overrides, word",
    [
        (["groups.siez=4"], "groups.size"),
        (["groups.sizes=4"], "groups.size"),
        (["train.learning_rte=1"], "train.learning_rate"),
        (["groups.size=1"], "between 2 and 4096"),
        (["groups.size=4", "groups.train_size=8"], "only 4 members"),
        (["groups.train_size=1"], "nothing to be compared with"),
        (["groups.groups=40"], "draws_max is 32"),
        (["serving.is_borrowed=false", "worker.is_used=false"], "no worker would play"),
        (["compare=true", "steps=8", "worker.is_used=false"], "both are needed"),
        (["compare=true", "steps=10"], "steps=12"),
        (["profile=rollout-hevy"], "rollout-heavy"),
        (["environment=frozenlak"], "frozenlake"),
        (["environment_options.sise=8"], "did you mean size? there are size, is_slippery, view, turns_max"),
        (["environment_options.name=lake"], "environment frozenlake has no option 'name'"),
        (["environment_options.size=eight"], "`size` must be a whole number, not 'eight'"),
        (["environment_options.size=5"], "size 4 or 8"),
        (["environment_option.size=8"], "environment_options"),
        (["serving.preset=qwen3-3b"], "qwen3-3m"),
        (["traffic.source=poison:rate=2"], "poisson"),
        (["serving.device=gpu:0"], "cpu:0"),
        (["name=../../etc"], "first-try"),
        (["steps=many"], "whole number"),
        (["weights.keep_versions=0"], "between 1 and"),
        (["weights.relya=here"], "weights.relay"),
        (["weights.relay=ftp://relay.example"], "is not the address of a relay"),
    ],
)
def test_what_is_refused_and_the_word_that_helps(overrides, word):
    with pytest.raises(ConfigError) as refused:
        load_run_settings(None, overrides)
    assert word in str(refused.value)
