"""docs/settings.md and `rose settings` list every setting that the commands accept."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.cli import main as cli
from rose.cli.settings import settings_by_command
from rose.config.loading import known_keys

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["settings", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), "run: rose settings --markdown > docs/settings.md"


def test_every_known_key_is_on_the_page() -> None:
    page = PAGE.read_text()
    keys = {key for settings in settings_by_command().values() for key in known_keys(type(settings))}
    assert len(keys) > 100
    assert [key for key in keys if f"| `{key}` |" not in page] == []


def test_one_command_shows_its_settings_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["settings", "gateway"]) == 0
    printed = capsys.readouterr().out
    assert "  wait_s = 30.0\n" in printed and "lend.ttft_ms" not in printed
    assert max(map(len, printed.splitlines())) <= 80
