"""The board between a serving engine and a rollout engine: whole or not at all, and dead when its writer is."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.facts import RunningRequest, StepFeatures, WaitingRequest
from rose.core.passive import FinishedStep, Milestone, MilestoneKind
from rose.engines.vllm import board as board_module
from rose.engines.vllm import finding
from rose.engines.vllm.board import IN_STEP, NO_STEP, STALE_S, STEPS_KEPT, About, BoardReader, BoardWriter, about_me
from rose.engines.vllm.desk import Control, Status, control_sheet, status_sheet
from rose.engines.vllm.mapped import SLOTS, MappedFile, Ring, Slots, Torn
from rose.errors import ConfigError, Unavailable

SHAPE = StepFeatures(3, 40, 50, 2)


def about(**changes: object) -> About:
    plain = about_me("vllm 0", "a-model", step_tokens=512, sequences=64, kv_blocks=100, block_bytes=1000)
    return About(**{**{name: getattr(plain, name) for name in plain.__struct_fields__}, **changes})


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


def flat(*rows: tuple[float, ...]) -> list[float]:
    return [value for row in rows for value in row]


# What is shown is what is seen


def test_nothing_was_shown_yet(reader: BoardReader) -> None:
    assert reader.look() is None
    assert reader.about.model == "a-model"
    assert "shown nothing yet" in reader.why_dark(None, 0.0)


def test_a_view_comes_over_whole(writer: BoardWriter, reader: BoardReader) -> None:
    step = (10.0, 10.5, *dataclasses.astuple(SHAPE))
    writer.view(11.0, flat((1.5, 30), (2.5, 7)), flat((10.5, 400, 0.5)), kv_used_blocks=7, last=step)
    seen = reader.look()
    assert seen is not None
    assert seen.view.waiting == (WaitingRequest(1.5, 30), WaitingRequest(2.5, 7))
    assert seen.view.running == (RunningRequest(10.5, 400, 0.5),)
    assert (seen.view.kv_used_bytes, seen.view.kv_total_bytes) == (7_000, 100_000)
    assert (seen.view.last_step, seen.view.last_step_s, seen.written_s) == (SHAPE, 0.5, 11.0)


TIMES = st.floats(0, 1e9, allow_nan=False)
COUNTS = st.integers(0, 1 << 40)


@given(waiting=st.lists(st.tuples(TIMES, COUNTS), max_size=64), running=st.lists(st.tuples(TIMES, COUNTS, TIMES)))
def test_any_view_comes_over_whole(tmp_path_factory, waiting, running) -> None:
    path = tmp_path_factory.mktemp("boards") / "any.board"
    writer = BoardWriter(path, about())
    reader = BoardReader(path)
    for _ in range(SLOTS + 1):
        writer.view(1.0, flat(*waiting), flat(*running), 0, NO_STEP)
    seen = reader.look()
    assert seen is not None
    assert [(one.arrival_s, one.tokens_left) for one in seen.view.waiting] == sorted(waiting, key=lambda one: one[0])
    assert [(one.last_token_s, one.context_tokens, one.arrival_s) for one in seen.view.running] == running
    assert seen.view.number == SLOTS + 1
    reader.close()
    writer.close()


def test_more_than_a_view_holds_is_cut_off(writer: BoardWriter, reader: BoardReader) -> None:
    writer.view(1.0, flat(*[(0.0, 1)] * 500), flat(*[(0.0, 1, 0.0)] * 5000), 0, NO_STEP)
    seen = reader.look()
    assert seen is not None
    assert (len(seen.view.waiting), len(seen.view.running)) == (board_module.WAITING_SHOWN, board_module.RUNNING_SHOWN)


def test_who_came_after_the_view_waits(writer: BoardWriter, reader: BoardReader) -> None:
    writer.view(1.0, [], [], 0, NO_STEP)
    assert reader.look().view.is_idle
    writer.milestone(MilestoneKind.CAME, 1, 1.5, tokens=20)
    assert reader.look().view.waiting == (WaitingRequest(1.5, 20),)
    assert reader.look().view.waiting == (WaitingRequest(1.5, 20),), "until a view counts it"
    writer.view(2.0, [], [2.0, 21, 1.5], 0, NO_STEP)
    seen = reader.look()
    assert (seen.view.waiting, len(seen.view.running)) == ((), 1)


def test_a_step_that_changed_nobody_goes_on_from_the_view(writer: BoardWriter, reader: BoardReader) -> None:
    rows = flat((IN_STEP, 400 - 7, 0.5), (9.5, 20 - 7, 0.5))
    shape = dataclasses.astuple(SHAPE)
    writer.view(11.0, (), rows, kv_used_blocks=7, last=(10.0, 10.5, *shape), together=7)
    writer.step((10.5, 11.5, *shape), kv_used_blocks=8, together=8, is_view=True)
    seen = reader.look()
    assert seen.view.running == (RunningRequest(11.5, 401, 0.5), RunningRequest(9.5, 21, 0.5))
    assert (seen.view.number, seen.view.kv_used_bytes, seen.view.last_step_s, seen.written_s) == (2, 8_000, 1.0, 11.5)
    writer.view(12.0, (), (), kv_used_blocks=0)
    assert reader.look().view.is_idle, "a newer view owes nothing to an older step"


def test_a_step_of_a_view_that_is_not_there_is_torn(writer: BoardWriter, reader: BoardReader) -> None:
    """On a machine that reorders writes."""
    writer.view(1.0, (), (), 0)
    writer._view_slot = 2
    writer.step(NO_STEP)
    with pytest.raises(Torn):
        reader.look()


def test_steps_and_milestones_are_told_once_in_order(writer: BoardWriter, reader: BoardReader) -> None:
    writer.view(0.0, [], [], 0, NO_STEP)
    for number in range(5):
        writer.step((number, number + 0.5, number, *dataclasses.astuple(SHAPE)[1:]))
    writer.milestone(MilestoneKind.ENDED, 9, 4.0, tokens=3)
    seen = reader.look()
    assert [step.features.new_tokens for step in seen.steps] == [0, 1, 2, 3, 4]
    assert seen.steps[4] == FinishedStep(4.0, 4.5, dataclasses.replace(SHAPE, new_tokens=4))
    assert seen.milestones == (Milestone(MilestoneKind.ENDED, 9, 4.0, 3),)
    again = reader.look()
    assert (again.steps, again.milestones, again.lost) == ((), (), 0)


def test_who_reads_too_late_is_told_what_it_missed(writer: BoardWriter, reader: BoardReader) -> None:
    writer.view(0.0, [], [], 0, NO_STEP)
    for number in range(STEPS_KEPT + 100):
        writer.step((number, number + 0.5, *dataclasses.astuple(SHAPE)))
    seen = reader.look()
    assert len(seen.steps) + seen.lost == STEPS_KEPT + 100
    assert seen.lost >= 100
    assert seen.steps[-1].began_s == STEPS_KEPT + 99


def test_what_is_skipped_is_not_told_but_who_waits_is_known(writer: BoardWriter, reader: BoardReader) -> None:
    writer.view(0.0, [], [], 0, NO_STEP)
    writer.step((0.0, 0.5, *dataclasses.astuple(SHAPE)))
    writer.milestone(MilestoneKind.CAME, 1, 0.7, tokens=20)
    reader.skip()
    seen = reader.look()
    assert (seen.steps, seen.milestones, seen.lost) == ((), (), 0)
    assert seen.view.waiting == (WaitingRequest(0.7, 20),)
    writer.step((1.0, 1.5, *dataclasses.astuple(SHAPE)))
    assert [step.began_s for step in reader.look().steps] == [1.0]


def test_a_step_under_way_is_seen(writer: BoardWriter, reader: BoardReader) -> None:
    assert reader.busy_since_s == math.inf
    writer.busy_since(12.5)
    assert reader.busy_since_s == 12.5
    writer.busy_since(0.0)
    assert reader.busy_since_s == math.inf


# Dark boards


def test_silence_is_stale_only_if_there_is_work(writer: BoardWriter, reader: BoardReader) -> None:
    writer.view(100.0, [], [], 0, NO_STEP)
    assert reader.why_dark(reader.look(), 100.0 + 1e6) == ""
    writer.view(100.0, [], [100.0, 5, 99.0], 0, NO_STEP)
    assert reader.why_dark(reader.look(), 100.0 + 0.9 * STALE_S) == ""
    assert "silent" in reader.why_dark(reader.look(), 100.0 + 1.1 * STALE_S)


def test_a_writer_that_stopped_says_why(writer: BoardWriter, reader: BoardReader) -> None:
    writer.view(1.0, [], [], 0, NO_STEP)
    assert reader.off == ""
    writer.turn_off("KeyError: 'x'" + "!" * 5000)
    assert "KeyError: 'x'" in reader.why_dark(reader.look(), 1.0)


WRITE_ONE = """
import sys, time
from pathlib import Path
from rose.engines.vllm.board import BoardWriter, about_me
writer = BoardWriter(Path(sys.argv[1]), about_me("e", "m", step_tokens=1, sequences=1, kv_blocks=1, block_bytes=1))
writer.view(time.monotonic(), [], [], 0)
print("shown", flush=True)
sys.stdin.read()
"""

WRITE_FAST = """
import sys
from pathlib import Path
from rose.core.passive import MilestoneKind
from rose.engines.vllm.board import BoardWriter, about_me
writer = BoardWriter(Path(sys.argv[1]), about_me("e", "m", step_tokens=1, sequences=1, kv_blocks=1, block_bytes=1))
print("shown", flush=True)
for number in range(1, 40_000):
    count = 1 + number % 50
    shape = (number, number, number, number)
    step = (number, number, *shape)
    writer.view(number, [number] * (2 * count), [0.0, number, number] * count, number, step)
    writer.step(step, number)
    writer.step((number, number + 0.25, *shape), number, together=1, is_view=True)
    writer.step((number, number + 0.5, *shape), number, together=2, is_view=True)
    writer.milestone(MilestoneKind.ENDED, number, number, number)
"""


def start(code: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "shown\n"
    return process


def test_a_killed_writer_is_dead_and_its_board_with_it(path: Path) -> None:
    process = start(WRITE_ONE, path)
    reader = BoardReader(path)
    assert reader.why_dark(reader.look(), 0.0) == ""
    process.kill()
    process.wait()
    assert reader.why_dark(reader.look(), 0.0) == "the serving engine is gone"
    with pytest.raises(Unavailable, match="gone"):
        BoardReader(path)
    reader.close()


def test_another_process_of_the_same_id_is_not_taken_for_it(path: Path) -> None:
    writer = BoardWriter(path, about(started=1))
    with pytest.raises(Unavailable, match="gone"):
        BoardReader(path)
    writer.close()


def test_a_reader_beside_a_fast_writer_never_sees_half_a_view(path: Path) -> None:
    process = start(WRITE_FAST, path)
    reader = BoardReader(path)
    views = steps = lost = newest = 0
    while process.poll() is None:
        try:
            seen = reader.look()
        except Torn:
            continue
        if seen is None:
            continue
        assert seen.view.number >= newest
        views, newest, lost = views + (seen.view.number > newest), seen.view.number, lost + seen.lost
        number, again = divmod(newest + 2, 3)
        assert {one.tokens_left for one in seen.view.waiting} == {number}
        assert {one.last_token_s for one in seen.view.running} == {seen.written_s} == {number + again / 4}
        assert {one.context_tokens for one in seen.view.running} == {number + again}
        assert len(seen.view.running) == len(seen.view.waiting) == 1 + number % 50
        assert seen.view.last_step == StepFeatures(number, number, number, number)
        for step in seen.steps:
            assert step.features.kv_read_tokens == step.began_s == int(step.ended_s)
        steps += len(seen.steps) + len(seen.milestones)
    assert views > 10
    assert steps + lost > views
    reader.close()


# The mapped file itself


def test_a_slot_that_is_not_what_it_says_is_torn(tmp_path: Path) -> None:
    file = MappedFile.create(tmp_path / "slots", Slots.size_bytes(64), lambda made: None)
    slots = Slots(file, 0, 64)
    assert slots.read() == (0, b"")
    assert slots.write(b"whole") == 1
    assert slots.read() == (1, b"whole")
    where = file.bytes.find(b"whole")
    file.bytes[where] ^= 1
    with pytest.raises(Torn):
        slots.read()
    file.bytes[where] ^= 1
    file.words[0] = 2  # the writer said so, and its slot is not there yet
    with pytest.raises(Torn):
        slots.read()
    file.close()


@given(appended=st.lists(st.integers(0, 30), max_size=20))
def test_a_ring_tells_every_record_or_that_it_is_lost(tmp_path_factory, appended) -> None:
    path = tmp_path_factory.mktemp("rings") / "ring"
    file = MappedFile.create(path, Ring.size_bytes(16, 2), lambda made: None)
    ring, seen, told = Ring(file, 0, 16, 2), 0, 0
    for count in appended:
        for _ in range(count):
            ring.append(ring.number + 1, 0.5)
        found, lost = ring.since(seen)
        assert [number for number, _ in found] == list(range(seen + 1 + lost, ring.number + 1))
        assert all(values == (number, 0.5) for number, values in found)
        told += len(found) + lost
        seen = ring.number
    assert told == sum(appended)
    file.close()


def test_a_new_file_takes_the_place_of_an_old_one_at_once(path: Path, reader: BoardReader, writer: BoardWriter) -> None:
    writer.view(1.0, [], [], 0, NO_STEP)
    other = BoardWriter(path, about(boot="another"))
    assert reader.look() is not None, "who has the old one keeps it"
    assert BoardReader(path).about.boot == "another"
    other.close()


def test_what_is_not_a_board_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no board"):
        BoardReader(tmp_path / "nowhere")
    path.write_bytes(b"\1" * 5000)
    with pytest.raises(Unavailable, match="not a board"):
        BoardReader(path)
    BoardWriter(path, about(layout=99))
    with pytest.raises(Unavailable, match="layout 99"):
        BoardReader(path)


# Desks


def test_a_desk_carries_wishes_one_way_and_the_state_the_other(tmp_path: Path) -> None:
    wishes, read_wishes = control_sheet(tmp_path, create=True), control_sheet(tmp_path)
    assert read_wishes.read() == (0, None)
    number = wishes.write(Control(tokens=5, sequences=2, until_s=1e12, kv_bytes=None))
    assert read_wishes.read() == (number, Control(5, 2, 1e12))
    state = status_sheet(tmp_path, create=True)
    state.write(Status(7, done=number, why="é" * 100))
    assert status_sheet(tmp_path).read()[1] == Status(7, done=number, why="é" * 100)


def test_a_desk_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        control_sheet(tmp_path / "none")


# Finding


def test_the_board_of_a_server_is_found_by_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setenv(finding.FOLDER_VARIABLE, str(tmp_path / "boards"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="shows no board"):
            finding.board_of(url)
        path = finding.new_board_path()
        writer = BoardWriter(path, about())
        assert finding.board_of(url) == path
        writer.close()
    with pytest.raises(Unavailable, match="nobody listens"):
        finding.board_of(url)


def test_a_board_is_not_shown_by_another_process_of_the_same_id(path: Path) -> None:
    BoardWriter(path, about())
    assert finding.is_shown(path)
    BoardWriter(path, about(started=1))
    assert not finding.is_shown(path)
    path.unlink()
    assert not finding.is_shown(path)


def test_boards_of_the_dead_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(finding.FOLDER_VARIABLE, str(tmp_path))
    namespace = finding.own_name().partition("-")[0]
    board, desk = tmp_path / f"{namespace}-999999999.board", tmp_path / f"desk-{namespace}-999999999-a_1"
    living, others = tmp_path / f"desk-{finding.own_name()}-a_1", tmp_path / "1-999999999.board"
    for path in (board, others):
        path.write_bytes(b"")
    for path in (desk, living):
        (path / "inside").mkdir(parents=True)
    assert finding.new_board_path() == tmp_path / f"{namespace}-{os.getpid()}.board"
    assert sorted(tmp_path.iterdir()) == sorted([living, others]), "who lives in another container cannot be told"
    assert finding.boards() == []


def test_a_board_of_another_container_is_not_taken_for_one_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(finding.FOLDER_VARIABLE, str(tmp_path))
    BoardWriter(tmp_path / f"1-{os.getpid()}.board", about())
    assert finding.boards() == []
    BoardWriter(finding.new_board_path(), about())
    assert len(finding.boards()) == 1


def test_a_server_of_several_engines_is_not_lent_by_what_one_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setenv(finding.FOLDER_VARIABLE, str(tmp_path))
    first = finding.new_board_path()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for path in (first, first.with_stem(f"{first.stem}0")):
            BoardWriter(path, about())
        with pytest.raises(ConfigError, match="2 engines"):
            finding.board_of(f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("url, port", [("http://a:8000/v1", 8000), ("http://a", 80), ("https://a", 443)])
def test_an_address_without_a_port_has_one(url: str, port: int) -> None:
    assert finding.port_of(url) == port
