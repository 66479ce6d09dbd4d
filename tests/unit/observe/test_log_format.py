"""Lines of logs: UTC first, plain or JSON, and the same choice in the processes that a command starts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from rose.observe.log_format import FORMAT_VARIABLE, UtcFormatter, choose_format

PROGRAM = (
    "import logging; from rose.observe.log_format import configure_logs; configure_logs(role='rollouts');"
    "logging.getLogger('rose.test').warning('%s are cut', 'lines')"
)


def record(trouble: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if trouble is None else (type(trouble), trouble, None)
    made = logging.LogRecord("rose.test", logging.WARNING, "file", 1, "a %s", ("word",), exc_info)
    made.created = 0.25
    return made


def test_a_plain_line_begins_with_utc():
    assert UtcFormatter(as_json=False).format(record()) == "1970-01-01T00:00:00.250000Z WARNING rose.test: a word"
    assert (
        UtcFormatter(as_json=False, role="x").format(record(ValueError("no"))).endswith("(x): a word\nValueError: no")
    )


def test_a_line_of_json_is_one_object_even_with_a_traceback():
    line = UtcFormatter(as_json=True).format(record(ValueError("no")))
    assert "\n" not in line
    assert json.loads(line) == {
        "utc": "1970-01-01T00:00:00.250000Z",
        "level": "WARNING",
        "logger": "rose.test",
        "message": "a word",
        "traceback": "ValueError: no",
    }


@pytest.mark.parametrize("name", ["plain", "json"])
def test_the_choice_travels_by_the_environment(name, monkeypatch):
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    choose_format(None)
    assert FORMAT_VARIABLE not in os.environ
    choose_format(name)
    shown = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60).stderr
    if name == "json":
        assert json.loads(shown)["message"] == "lines are cut" and json.loads(shown)["role"] == "rollouts"
    else:
        utc, level, *words = shown.split()
        assert datetime.fromisoformat(utc).tzinfo == UTC and (level, words[-1]) == ("WARNING", "cut")
