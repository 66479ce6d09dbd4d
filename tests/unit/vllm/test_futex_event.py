"""Waiters sleep until they are woken from another process, and waking costs next to nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.vllm.test_status_segment import SHAPE, header, start

from rose.vllm import futex_event
from rose.vllm.status_segment import SegmentReader, SegmentWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "here.board"


@pytest.fixture
def writer(path: Path):
    made = SegmentWriter(path, header())
    yield made
    made.close()


@pytest.fixture
def reader(writer: SegmentWriter, path: Path):
    opened = SegmentReader(path)
    yield opened
    opened.close()


def test_one_event_fires_at_every_write_and_one_when_serving_is_idle(
    writer: SegmentWriter, reader: SegmentReader
) -> None:
    def rung() -> tuple[int, int]:
        return reader.news.number, reader.idle.number

    writer.view(1.0, [], [1.0, 5, 0.5, 0.75, 1], 0, is_step_next=True)
    assert rung() == (0, 0), "once for both"
    writer.step((0.5, 1.0, *dataclasses.astuple(SHAPE)))
    assert rung() == (1, 0)
    writer.view(2.0, [], [], 0)
    assert rung() == (2, 1)


RING = """
import sys
from pathlib import Path
from rose.vllm.status_segment import SegmentWriter, own_header
sizes = dict.fromkeys(("step_tokens", "sequences", "kv_blocks", "block_bytes", "block_tokens"), 1)
writer = SegmentWriter(Path(sys.argv[1]), own_header("e", "m", **sizes))
print("shown", flush=True)
sys.stdin.readline()
writer.view(1.0, [], [], 0)
sys.stdin.read()
"""


@pytest.mark.parametrize("has_call", [pytest.param(True, id="by the kernel"), pytest.param(False, id="by looking")])
def test_a_waiter_is_woken_from_another_process(path: Path, has_call: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_call:
        monkeypatch.setattr(futex_event, "FUTEX", None)
    process = start(RING, path)
    reader = SegmentReader(path)
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


def _wait_for_another(rung: futex_event.FutexEvent, number: int) -> None:
    while rung.number == number:
        rung.wait(number, 600.0)


def _until_asleep(thread: threading.Thread, rung: futex_event.FutexEvent) -> None:
    """In the kernel, on that very number: a thread that is not there yet would find it changed, rung or not."""
    call = Path(f"/proc/self/task/{thread.native_id}/syscall")
    while call.exists() and hex(rung._address) not in call.read_text().split():
        time.sleep(0.001)


def _refused(*arguments: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


@pytest.mark.parametrize("call", [pytest.param(None, id="has none"), pytest.param(_refused, id="forbids it")])
def test_without_the_futex_call_a_wait_polls_for_as_long(
    call: object, writer: SegmentWriter, reader: SegmentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever came back early would ask an engine to look hundreds of times a second."""
    now_s, naps = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now_s[0] += seconds
        if len(naps) == 100:
            writer.view(1.0, [], [], 0)

    monkeypatch.setattr(futex_event, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s[0]))
    monkeypatch.setattr(futex_event, "_wait", call)
    if call is None:
        monkeypatch.setattr(futex_event, "FUTEX", None)
    reader.idle.wait(0, 0.25)
    assert sum(naps) == pytest.approx(0.25)
    reader.idle.wait(0, 10.0)
    assert len(naps) == 100, "rung"


def test_notifying_keeps_the_interpreter_lock(writer: SegmentWriter) -> None:
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
            writer._news.notify()
        ended = len(turns)
    finally:
        is_over.set()
        sys.setswitchinterval(before_s)
    thread.join()
    assert ended == begun


def test_only_waiters_with_a_future_deadline_are_woken(
    writer: SegmentWriter, reader: SegmentReader, monkeypatch: pytest.MonkeyPatch
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


def test_the_latest_deadline_of_several_waiters_counts(writer: SegmentWriter, path: Path) -> None:
    readers = [SegmentReader(path), SegmentReader(path)]
    for reader, timeout_s in zip(readers, (0.05, 0.001)):
        reader.news.wait(0, timeout_s)
    rung = list[str]()
    writer._news._wake = lambda: rung.append("news")  # type: ignore[assignment]
    writer.view(time.monotonic() - 0.02, [], [], 0)
    assert rung == ["news"]
    for reader in readers:
        reader.close()


def test_waiting_on_a_closed_file_does_not_hang(path: Path, writer: SegmentWriter) -> None:
    reader = SegmentReader(path)
    rung = reader.idle
    reader.close()
    rung.wait(0, 0.01)
    with pytest.raises(ValueError):
        rung.number  # noqa: B018
