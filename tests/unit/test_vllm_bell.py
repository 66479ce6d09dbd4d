"""Bells between processes: whoever waits sleeps until one is rung, and ringing costs next to nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.test_vllm_board import SHAPE, about, start

from rose.engines.vllm import bell
from rose.engines.vllm.board import BoardReader, BoardWriter
from rose.engines.vllm.stalled import Stalled


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "here.board"


@pytest.fixture
def writer(path: Path):
    made = BoardWriter(path, about())
    yield made
    made.close()


@pytest.fixture
def reader(writer: BoardWriter, path: Path):
    opened = BoardReader(path)
    yield opened
    opened.close()


def test_one_bell_rings_at_whatever_is_shown_and_one_when_nothing_is_left(
    writer: BoardWriter, reader: BoardReader
) -> None:
    def rung() -> tuple[int, int]:
        return reader.news.number, reader.idle.number

    writer.view(1.0, [], [1.0, 5, 0.5], 0, is_step_next=True)
    assert rung() == (0, 0), "once for both"
    writer.step((0.5, 1.0, *dataclasses.astuple(SHAPE)))
    assert rung() == (1, 0)
    writer.view(2.0, [], [], 0)
    assert rung() == (2, 1)


RING = """
import sys
from pathlib import Path
from rose.engines.vllm.board import BoardWriter, about_me
writer = BoardWriter(Path(sys.argv[1]), about_me("e", "m", step_tokens=1, sequences=1, kv_blocks=1, block_bytes=1))
print("shown", flush=True)
sys.stdin.readline()
writer.view(1.0, [], [], 0)
sys.stdin.read()
"""


@pytest.mark.parametrize("has_call", [pytest.param(True, id="by the kernel"), pytest.param(False, id="by looking")])
def test_who_waits_is_woken_from_another_process(path: Path, has_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_call:
        monkeypatch.setattr(bell, "FUTEX", None)
    process = start(RING, path)
    reader = BoardReader(path)
    waited = threading.Thread(target=_wait_for_another, args=(reader.idle, 0), daemon=True)
    waited.start()
    if has_call:
        _until_asleep(waited, reader.idle)
    assert process.stdin is not None
    process.stdin.write("now\n")
    process.stdin.flush()
    waited.join(30.0)
    assert not waited.is_alive()
    assert reader.idle.number == 1
    process.kill()
    process.wait()


def _wait_for_another(rung: bell.Bell, number: int) -> None:
    while rung.number == number:
        rung.wait(number, 600.0)


def _until_asleep(thread: threading.Thread, rung: bell.Bell) -> None:
    """In the kernel, on that very number: a thread that is not there yet would find it changed, rung or not."""
    call = Path(f"/proc/self/task/{thread.native_id}/syscall")
    while call.exists() and hex(rung._address) not in call.read_text().split():
        time.sleep(0.001)


def _refused(*arguments: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


@pytest.mark.parametrize("call", [pytest.param(None, id="has none"), pytest.param(_refused, id="forbids it")])
def test_where_the_kernel_has_no_call_one_waits_as_long(
    call: object, writer: BoardWriter, reader: BoardReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever came back early would ask an engine to look hundreds of times a second."""
    now_s, naps = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now_s[0] += seconds
        if len(naps) == 100:
            writer.view(1.0, [], [], 0)

    monkeypatch.setattr(bell, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s[0]))
    monkeypatch.setattr(bell, "_wait", call)
    if call is None:
        monkeypatch.setattr(bell, "FUTEX", None)
    reader.idle.wait(0, 0.25)
    assert sum(naps) == pytest.approx(0.25)
    reader.idle.wait(0, 10.0)
    assert len(naps) == 100, "rung"


def test_ringing_lets_nobody_else_run_in_between(writer: BoardWriter) -> None:
    """Serving's engine rings in the middle of its step, and its other threads would be glad of Python's lock."""
    turns, is_over = list[int](), threading.Event()

    def crowd() -> None:
        while not is_over.is_set():
            turns.append(1)
            time.sleep(0)

    thread, before_s = threading.Thread(target=crowd, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        begun = len(turns)
        for _ in range(1000):
            writer._news.ring()
        ended = len(turns)
    finally:
        is_over.set()
        sys.setswitchinterval(before_s)
    thread.join()
    assert ended == begun


def test_only_who_listens_is_rung_for(
    writer: BoardWriter, reader: BoardReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring costs serving's step more than all else that is shown of it."""
    rung = list[str]()
    monkeypatch.setattr(writer._news, "_wake", lambda: rung.append("news"))
    monkeypatch.setattr(writer._idle, "_wake", lambda: rung.append("idle"))
    begun_s = time.monotonic()
    writer.view(begun_s, [], [], 0)
    assert rung == []
    reader.idle.wait(reader.idle.number, 0.01)
    writer.view(begun_s, [], [], 0)
    assert rung == ["idle"], "the other bell is another's"
    writer.view(time.monotonic() + 1.0, [], [], 0)
    assert rung == ["idle"], "nobody has listened since"


def test_who_listens_longest_is_not_forgotten(writer: BoardWriter, path: Path) -> None:
    readers = [BoardReader(path), BoardReader(path)]
    for reader, timeout_s in zip(readers, (0.05, 0.001)):
        reader.news.wait(0, timeout_s)
    rung = list[str]()
    writer._news._wake = lambda: rung.append("news")  # type: ignore[assignment]
    writer.view(time.monotonic() - 0.02, [], [], 0)
    assert rung == ["news"]
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("cores, stalled_s", [({3}, 5.0), ({3, 4}, 0.0)])
def test_a_thread_that_waits_excuses_a_step_on_one_core_only(
    cores: set[int], stalled_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    monkeypatch.setattr(os, "open", lambda *arguments: 99)
    monkeypatch.setattr(os, "pread", lambda *arguments: b"7 5000000000 3")
    assert Stalled().seconds() == stalled_s


def test_who_waits_at_a_closed_board_does_not_hang(path: Path, writer: BoardWriter) -> None:
    reader = BoardReader(path)
    rung = reader.idle
    reader.close()
    rung.wait(0, 0.01)
    with pytest.raises(ValueError):
        rung.number  # noqa: B018
