"""A relay folder: opened and swept while another process writes to it; its modes, and what it syncs."""

from __future__ import annotations

import fcntl
import os

import pytest

from rose.weights.relay import filesystem
from rose.weights.relay.filesystem import TEMPORARY, FilesystemRelay
from rose.weights.relay.relay_base import KeyExists, KeyMissing


def test_a_file_swept_before_its_writer_locked_it_is_made_again(tmp_path, monkeypatch):
    writer, lock, swept = FilesystemRelay(tmp_path), fcntl.flock, []

    def lock_late(file, how):
        if not swept:
            swept.extend((tmp_path / TEMPORARY).iterdir())
            FilesystemRelay(tmp_path)
        lock(file, how)

    monkeypatch.setattr(filesystem.fcntl, "flock", lock_late)
    assert writer.put_new("run/a", [b"whole"]) == 5
    assert len(swept) == 1
    assert bytes(writer.get("run/a")) == b"whole"


def test_a_writer_waits_while_somebody_looks_whether_its_file_is_left_over(tmp_path, monkeypatch):
    writer, lock, looked = FilesystemRelay(tmp_path), fcntl.flock, []

    def lock_late(file, how):
        if not looked:
            looked.extend((tmp_path / TEMPORARY).iterdir())
            looking = looked[0].open("rb")
            lock(looking, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert not how & fcntl.LOCK_NB
            looking.close()
        lock(file, how)

    monkeypatch.setattr(filesystem.fcntl, "flock", lock_late)
    assert writer.put_new("run/a", [b"whole"]) == 5
    assert bytes(writer.get("run/a")) == b"whole"
    assert list((tmp_path / TEMPORARY).iterdir()) == []


def test_files_and_folders_are_readable_by_their_user_only(tmp_path):
    before = os.umask(0)
    try:
        relay = FilesystemRelay(tmp_path / "new" / "relay")
        relay.put_new("run/e1/manifest", [b"weights"])
    finally:
        os.umask(before)
    made = [tmp_path / "new" / "relay", *(tmp_path / "new" / "relay").rglob("*")]
    assert len(made) == 5 and not [path for path in made if path.stat().st_mode & 0o077]


def test_a_value_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    relay = FilesystemRelay(tmp_path)
    calls = []

    def recorded(name, call):
        def wrapper(first, *rest):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            calls.append((name, "value" if "/.writing/" in path else path.removeprefix(str(tmp_path))))
            return call(first, *rest)

        return wrapper

    monkeypatch.setattr(os, "fsync", recorded("fsync", os.fsync))
    monkeypatch.setattr(os, "link", recorded("link", os.link))
    relay.put_new("run/a", [b"value"])
    assert calls == [("fsync", "value"), ("fsync", ""), ("link", "value"), ("fsync", "/run")]
    calls.clear()
    FilesystemRelay(tmp_path, durable=False).put_new("run/b", [b"value"])
    assert calls == [("link", "value")]


def test_a_link_or_a_pipe_in_the_folder_is_no_value(tmp_path):
    relay = FilesystemRelay(tmp_path / "relay")
    (tmp_path / "private").write_bytes(b"private")
    (tmp_path / "relay" / "link").symlink_to(tmp_path / "private")
    os.mkfifo(tmp_path / "relay" / "pipe")
    for key in ("link", "pipe"):
        with pytest.raises(KeyMissing):
            relay.get(key)
    assert relay.list() == []
    os.mkfifo(tmp_path / "relay" / TEMPORARY / "pipe")
    FilesystemRelay(tmp_path / "relay").put_new("a", [b"opening does not wait for the pipe"])


def test_the_second_of_two_writers_of_one_key_is_refused(tmp_path):
    relay = FilesystemRelay(tmp_path)

    def overtaken():
        relay.put_new("a", [b"first"])
        yield b"second"

    with pytest.raises(KeyExists):
        relay.put_new("a", overtaken())
    assert bytes(relay.get("a")) == b"first"
