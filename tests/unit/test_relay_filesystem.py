"""A folder that one process opens, and sweeps, at the very moment in which another writes to it."""

from __future__ import annotations

import fcntl

from rose.weights.relay import filesystem
from rose.weights.relay.filesystem import TEMPORARY, FilesystemRelay


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
