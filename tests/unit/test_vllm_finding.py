"""The folder of boards in shared memory belongs to its user, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.engines.vllm.finding import FOLDER_VARIABLE, own_folder
from rose.errors import ConfigError


def test_own_folder_refuses_a_link_that_another_user_may_have_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "boards").symlink_to(tmp_path / "target")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "boards"))
    with pytest.raises(ConfigError, match="cannot be used"):
        own_folder()


def test_own_folder_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "new" / "boards"))
    assert own_folder().stat().st_mode & 0o077 == 0
