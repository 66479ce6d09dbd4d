"""Who owns a page: locks, the column of last owners, and pools that must not be joined."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.device.kv_pool.ledger import (
    COLUMN_OFFSET,
    HEADER,
    PAGES_MAX,
    PID_BITS,
    PageLedger,
    is_running,
    process_identity,
)
from rose.errors import ConfigError, Unavailable

PAGES = 16
HEADER_FIELDS = ("magic", "version", "uid", "pages", "page_bytes", "serving", "namespace", "pool_id", "boot_id")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


@pytest.fixture
def serving(path: Path) -> Iterator[PageLedger]:
    made = PageLedger(path, PAGES, create=True)
    yield made
    made.close()


@pytest.fixture
def borrower(serving: PageLedger) -> Iterator[PageLedger]:
    made = PageLedger(serving.path, PAGES)
    yield made
    made.close()


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def set_last_owner(ledger: PageLedger, page: int, identity: int) -> None:
    with open(ledger.path, "r+b") as file:
        file.seek(COLUMN_OFFSET + 8 * page)
        file.write(struct.pack("=Q", identity))


def test_a_page_has_one_owner_and_is_free_when_given_up(serving: PageLedger, borrower: PageLedger) -> None:
    assert serving.try_own(3) and not serving.try_own(3) and not borrower.try_own(3)
    assert not serving.is_free(3) and not borrower.is_free(3) and borrower.is_free(4)
    assert borrower.owners() == serving.owners() == {3: os.getpid()}
    serving.give_up([3])
    assert borrower.try_own(3) and serving.free_count() == PAGES - 1 and (serving.held, borrower.held) == (0, 1)


def test_runs_are_taken_around_the_pages_of_others(serving: PageLedger, borrower: PageLedger) -> None:
    assert all(borrower.try_own(page) for page in (2, 3, 9))
    assert serving.own_up_to(0) == []
    assert serving.own_up_to(4) == [0, 1, 4, 5]
    assert serving.own_up_to(100) == [6, 7, 8, 10, 11, 12, 13, 14, 15]
    assert borrower.free_count() == 0 and borrower.own_up_to(1) == []
    serving.give_up([15, 0, 7])
    assert borrower.own_up_to(2) == [0, 7] and borrower.is_free(15)


def test_a_run_that_another_owner_cut_is_taken_in_parts(serving: PageLedger, borrower: PageLedger) -> None:
    assert borrower.try_own(5)
    assert serving._own_run(0, PAGES) == [page for page in range(PAGES) if page != 5]


def test_giving_up_a_page_that_is_not_held_is_a_bug(serving: PageLedger, borrower: PageLedger) -> None:
    assert borrower.try_own(1)
    with pytest.raises(AssertionError):
        serving.give_up([1])
    assert not serving.is_free(1)


def test_a_page_freed_by_a_death_waits_until_the_process_is_gone(
    serving: PageLedger, other_process: subprocess.Popen[bytes]
) -> None:
    set_last_owner(serving, 0, process_identity(other_process.pid))
    assert not serving.is_free(0) and not serving.try_own(0) and serving.free_count() == PAGES - 1
    assert serving._own_run(0, 3) == [1, 2]
    other_process.kill()
    os.waitid(os.P_PID, other_process.pid, os.WEXITED | os.WNOWAIT)  # a zombie has neither memory nor files
    assert serving.try_own(0)


def test_a_process_id_that_is_used_again_does_not_hold_a_page_back(
    serving: PageLedger, other_process: subprocess.Popen[bytes]
) -> None:
    earlier = process_identity(other_process.pid) - (1 << PID_BITS)  # started one tick before
    set_last_owner(serving, 0, earlier)
    assert serving.try_own(0)


def test_pages_of_a_ledger_that_was_closed_too_early_stay_out_of_use(serving: PageLedger, path: Path) -> None:
    early = PageLedger(path, PAGES)
    assert early.own_up_to(2) == [0, 1]
    early.close()
    early.close()
    assert serving.own_up_to(2) == [2, 3], "this process may still have them mapped"


def test_processes_are_named_so_that_none_is_taken_for_another() -> None:
    assert is_running(process_identity(os.getpid())) and not is_running(process_identity(os.getpid()) + (1 << PID_BITS))
    assert process_identity(1 << PID_BITS) == 0 and not is_running(0)


def test_a_forked_child_does_not_keep_the_locks(serving: PageLedger) -> None:
    serving.try_own(0)
    pid = os.fork()
    if pid == 0:
        os._exit(serving._descriptor != -1)
    assert os.waitpid(pid, 0)[1] == 0
    assert serving.owners() == {0: os.getpid()}


def test_borrowers_see_who_serves(serving: PageLedger, borrower: PageLedger) -> None:
    assert serving.serving_pid() == os.getpid()
    borrower._me = 0  # as if it were another process
    assert borrower.serving_pid() == os.getpid()
    serving.close()
    assert borrower.serving_pid() is None


def test_a_second_serving_engine_is_refused_until_the_first_has_ended(serving: PageLedger, path: Path) -> None:
    with pytest.raises(Unavailable, match=f"another serving engine.*process {os.getpid()}"):
        PageLedger(path, PAGES, create=True)
    serving.try_own(0)
    serving.close()
    after = PageLedger(path, 4, create=True)
    assert after.free_count() == 4
    after.close()


def test_whatever_lies_at_the_path_is_replaced(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)
    path.chmod(0o600)
    ledger = PageLedger(path, PAGES, create=True)
    assert path.stat().st_mode & 0o777 == 0o600 and os.listdir(path.parent) == ["ledger"]
    ledger.close()


def test_a_disk_without_space_is_refused_and_nothing_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Unavailable, match="No space left"):
        PageLedger(path, PAGES, create=True)
    assert path.stat().st_size == 0 and os.listdir(path.parent) == ["ledger"]


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("magic", b"OTHER", "no ledger"),
        ("version", 99, "layout 99"),
        ("uid", 4242, "belongs to user 4242"),
        ("pages", PAGES + 1, "cut short"),
        ("page_bytes", 4096, "pages of 4096 bytes"),
        ("boot_id", b"another", "before this machine was restarted"),
        ("namespace", 1, "in another container"),
    ],
)
def test_a_pool_that_is_not_this_one_is_refused(serving: PageLedger, field: str, value: object, message: str) -> None:
    with open(serving.path, "r+b") as file:
        fields = dict(zip(HEADER_FIELDS, HEADER.unpack(file.read(HEADER.size)))) | {field: value}
        file.seek(0)
        file.write(HEADER.pack(*fields.values()))
    with pytest.raises(ConfigError, match=message):
        PageLedger(serving.path, PAGES)


def test_another_size_is_refused(serving: PageLedger) -> None:
    with pytest.raises(ConfigError, match=f"has {PAGES} pages"):
        PageLedger(serving.path, PAGES - 1)


@pytest.mark.parametrize("size", [0, HEADER.size - 1, COLUMN_OFFSET + 8 * PAGES - 1])
def test_a_ledger_that_is_cut_short_is_refused(serving: PageLedger, path: Path, size: int) -> None:
    path.with_name("copy").write_bytes(path.read_bytes()[:size])
    path.with_name("copy").chmod(0o600)
    with pytest.raises(ConfigError, match=r"cut short|no ledger"):
        PageLedger(path.with_name("copy"), PAGES)


def test_a_ledger_that_others_may_open_is_refused(serving: PageLedger, path: Path) -> None:
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="open to others"):
        PageLedger(path, PAGES)


def test_a_missing_ledger_or_a_link_is_refused(serving: PageLedger, path: Path) -> None:
    path.with_name("link").symlink_to(path)
    for name in ("missing", "link"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            PageLedger(path.with_name(name), PAGES)


@pytest.mark.parametrize("pages, page_bytes", [(0, 4096), (PAGES_MAX + 1, 4096), (4, 0), (4, 1 << 31)])
def test_impossible_sizes_are_refused(path: Path, pages: int, page_bytes: int) -> None:
    with pytest.raises(ConfigError, match="not possible"):
        PageLedger(path, pages, page_bytes=page_bytes, create=True)
    assert not path.exists()
