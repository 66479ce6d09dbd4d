"""Private files: no other user can read them, at no moment, and a crash leaves whole content."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose.private_files import make_private_folder, write_private


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(autouse=True)
def open_umask() -> object:
    """With the widest umask a mode that was forgotten shows."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_written_file_is_readable_by_its_user_only(tmp_path: Path) -> None:
    write_private(tmp_path / "secret", b"one")
    write_private(tmp_path / "secret", b"two")
    assert (tmp_path / "secret").read_bytes() == b"two" and mode_of(tmp_path / "secret") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_content_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    write_private(tmp_path / "secret", b"one")
    assert calls == ["fsync", "replace", "fsync"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "secret", b"one")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_private(tmp_path / "secret", b"two")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("secret", b"one")]


def test_an_existing_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"theirs")
    (tmp_path / "secret").symlink_to(tmp_path / "other")
    write_private(tmp_path / "secret", b"mine")
    assert (tmp_path / "other").read_bytes() == b"theirs" and not (tmp_path / "secret").is_symlink()


def test_a_private_folder_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    for name in ("open", "new"):
        make_private_folder(tmp_path / name)
        assert mode_of(tmp_path / name) == 0o700


def test_a_link_in_place_of_a_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        make_private_folder(tmp_path / "folder")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.chown(tmp_path / "folder", 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        make_private_folder(tmp_path / "folder")
