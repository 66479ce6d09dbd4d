"""What is sure to fail is said before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.cli.main import main
from rose.envs.alfworld import game_connection
from rose.errors import ConfigError
from rose.models.presets import write_preset
from rose.run.local import check_start
from rose.run.run_settings import load_run_settings


def test_what_is_shipped_can_be_started():
    profiles = ("default", "rollout-heavy")
    assert [check_start(load_run_settings(None, [f"profile={profile}"])) for profile in profiles] == [None, None]


def test_an_extra_that_is_not_installed_is_told_by_the_command_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(game_connection, "PACKAGES", ("no_such_alfworld",))
    model = write_preset("qwen3-3m", tmp_path / "model", seed=0)
    assert main(["run", "--set", "environment=alfworld", "--set", f"rollout_model={model}"]) == 2
    told = capsys.readouterr().err
    assert "no_such_alfworld" in told and "pip install 'rose-rl[alfworld]'" in told
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "no run was begun"


def test_a_relay_without_its_secret_uses_up_no_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for variable in ("ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)
    relay = "weights.relay=http://127.0.0.1:7070"
    assert main(["run", "--name", "it", "--set", relay]) == 2
    assert "the secret for the relay http://127.0.0.1:7070 is not known" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "no run was begun"
    monkeypatch.setenv("ROSE_RELAY_SECRET", "short")
    with pytest.raises(ConfigError, match="at least 16 are needed"):
        check_start(load_run_settings(None, [relay]))
    monkeypatch.setenv("ROSE_RELAY_SECRET", "long enough for anybody")
    check_start(load_run_settings(None, [relay]))


def test_options_are_looked_at_where_the_environment_is(tmp_path, monkeypatch):
    monkeypatch.setattr(game_connection, "PACKAGES", ())
    options = [f"environment_options.data={tmp_path}", "environment_options.split=valid_seen"]
    settings = load_run_settings(None, ["environment=alfworld", *options])
    with pytest.raises(ConfigError, match=f"{tmp_path} has no ALFWorld games of valid_seen"):
        check_start(settings)


def test_a_task_without_a_warm_start_needs_a_model(tmp_path: Path):
    with pytest.raises(ConfigError, match="the model to train has to be given"):
        check_start(load_run_settings(None, ["environment=frozenlake-8x8"]))
    model = write_preset("frozenlake-1m", tmp_path / "model", seed=0)
    check_start(load_run_settings(None, ["environment=frozenlake-8x8", f"rollout_model={model}"]))
