"""Options that commands share: settings from a file, from --set and from flags; tables."""

from __future__ import annotations

import argparse
import os

import pytest

from rose.cli.options import add_settings_options, print_table, say, settings_of
from rose.config.server_settings import DeviceSettings
from rose.errors import ConfigError

FLAGS = {"port": "front.port", "name": "model_name"}


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--name")
    add_settings_options(parser)
    return parser.parse_args(words)


def test_a_flag_wins_over_set_and_set_over_the_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("model_name: of the file\nfront:\n  port: 1\n  shutdown_s: 7\n")
    words = ["--settings", str(file), "--set", "front.port=2", "--set", "model_name=of set"]
    settings = settings_of(parsed(*words, "--port", "3"), DeviceSettings, FLAGS)
    assert (settings.front.port, settings.model_name, settings.front.shutdown_s) == (3, "of set", 7)
    assert settings_of(parsed(), DeviceSettings, FLAGS) == DeviceSettings()


def test_an_unknown_setting_is_refused():
    with pytest.raises(ConfigError, match="fornt"):
        settings_of(parsed("--set", "fornt.port=2"), DeviceSettings, FLAGS)


def test_columns_are_as_wide_as_they_need(capsys):
    print_table([("name", "n", ""), ("a", "100", "x"), ("longer", "2", "")], right=[1], indent="  ")
    assert capsys.readouterr().out == "  name      n\n  a       100  x\n  longer    2\n"
    print_table([])
    assert capsys.readouterr().out == ""


def test_a_closed_terminal_does_not_stop_the_program(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        say("the reader is gone")
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):
            closed.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), closed.fileno())
