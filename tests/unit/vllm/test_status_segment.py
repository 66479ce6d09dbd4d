"""The status segment: whole or not at all, and dead when its writer is."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.facts import RunningRequest, StepFeatures, WaitingRequest
from rose.core.observed_engine import FinishedStep, Milestone, MilestoneKind
from rose.errors import Unavailable
from rose.vllm import status_segment
from rose.vllm.seqlock_file import SLOTS, Torn
from rose.vllm.status_segment import (
    IN_STEP,
    NO_STEP,
    STALE_S,
    STEPS_KEPT,
    SegmentHeader,
    SegmentReader,
    SegmentWriter,
    own_header,
)

SHAPE = StepFeatures(3, 40, 50, 2)


def header(**changes: object) -> SegmentHeader:
    sizes = {"step_tokens": 512, "sequences": 64, "kv_blocks": 100, "block_bytes": 1000, "block_tokens": 16}
    plain = own_header("vllm 0", "a-model", **sizes)
    return SegmentHeader(**{**{name: getattr(plain, name) for name in plain.__struct_fields__}, **changes})


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


def flat(*rows: tuple[float, ...]) -> list[float]:
    return [value for row in rows for value in row]


def test_a_fresh_segment_has_no_view(reader: SegmentReader) -> None:
    assert reader.read() is None
    assert reader.header.model == "a-model"
    assert "published nothing yet" in reader.why_unreliable(None, 0.0)


def test_a_view_is_read_as_it_was_written(writer: SegmentWriter, reader: SegmentReader) -> None:
    step = (10.0, 10.5, *dataclasses.astuple(SHAPE))
    writer.view(11.0, flat((1.5, 30), (2.5, 7)), flat((10.5, 400, 0.5, 2.5, 9)), kv_used_blocks=7, last=step)
    seen = reader.read()
    assert seen is not None
    assert seen.view.waiting == (WaitingRequest(1.5, 30), WaitingRequest(2.5, 7))
    assert seen.view.running == (RunningRequest(10.5, 400, 0.5, 2.5, 9),)
    assert (seen.view.kv_used_bytes, seen.view.kv_total_bytes) == (7_000, 100_000)
    assert (seen.view.last_step, seen.view.last_step_s, seen.written_s) == (SHAPE, 0.5, 11.0)


TIMES = st.floats(0, 1e9, allow_nan=False)


COUNTS = st.integers(0, 1 << 40)


RUNNING = st.builds(RunningRequest, TIMES, COUNTS, TIMES, TIMES, COUNTS)


@given(waiting=st.lists(st.tuples(TIMES, COUNTS), max_size=64), running=st.lists(RUNNING))
def test_any_view_is_read_as_it_was_written(tmp_path_factory, waiting, running) -> None:
    path = tmp_path_factory.mktemp("boards") / "any.board"
    writer = SegmentWriter(path, header())
    reader = SegmentReader(path)
    for _ in range(SLOTS + 1):
        writer.view(1.0, flat(*waiting), flat(*map(dataclasses.astuple, running)), 0, NO_STEP)
    seen = reader.read()
    assert seen is not None
    assert [(one.arrival_s, one.tokens_left) for one in seen.view.waiting] == sorted(waiting, key=lambda one: one[0])
    assert list(seen.view.running) == running
    assert seen.view.number == SLOTS + 1
    reader.close()
    writer.close()


def test_requests_beyond_the_limits_of_a_view_are_cut_off(writer: SegmentWriter, reader: SegmentReader) -> None:
    writer.view(1.0, flat(*[(0.0, 1)] * 500), flat(*[(0.0, 1, 0.0, 0.0, 1)] * 5000), 0, NO_STEP)
    seen = reader.read()
    assert seen is not None
    assert (len(seen.view.waiting), len(seen.view.running)) == (
        status_segment.WAITING_SHOWN,
        status_segment.RUNNING_SHOWN,
    )


def test_a_request_that_arrived_after_the_view_waits(writer: SegmentWriter, reader: SegmentReader) -> None:
    writer.view(1.0, [], [], 0, NO_STEP)
    assert reader.read().view.is_idle
    writer.milestone(MilestoneKind.ARRIVED, 1, 1.5, tokens=20)
    assert reader.read().view.waiting == (WaitingRequest(1.5, 20),)
    assert reader.read().view.waiting == (WaitingRequest(1.5, 20),), "until a view counts it"
    writer.view(2.0, [], [2.0, 21, 1.5, 2.0, 1], 0, NO_STEP)
    seen = reader.read()
    assert (seen.view.waiting, len(seen.view.running)) == ((), 1)


def test_a_step_without_changes_continues_the_view(writer: SegmentWriter, reader: SegmentReader) -> None:
    rows = flat((IN_STEP, 400 - 7, 0.5, 1.5, 9 - 7), (9.5, 20 - 7, 0.5, 2.5, 8 - 7))
    shape = dataclasses.astuple(SHAPE)
    writer.view(11.0, (), rows, kv_used_blocks=7, last=(10.0, 10.5, *shape), together=7)
    writer.step((10.5, 11.5, *shape), kv_used_blocks=8, together=8, is_view=True)
    seen = reader.read()
    assert seen.view.running == (RunningRequest(11.5, 401, 0.5, 1.5, 10), RunningRequest(9.5, 21, 0.5, 2.5, 9))
    assert (seen.view.number, seen.view.kv_used_bytes, seen.view.last_step_s, seen.written_s) == (2, 8_000, 1.0, 11.5)
    writer.view(12.0, (), (), kv_used_blocks=0)
    assert reader.read().view.is_idle, "a newer view owes nothing to an older step"


def test_a_step_of_a_missing_view_is_torn(writer: SegmentWriter, reader: SegmentReader) -> None:
    """On a machine that reorders writes."""
    writer.view(1.0, (), (), 0)
    writer._view_slot = 2
    writer.step(NO_STEP)
    with pytest.raises(Torn):
        reader.read()


def test_steps_and_milestones_are_read_once_in_order(writer: SegmentWriter, reader: SegmentReader) -> None:
    writer.view(0.0, [], [], 0, NO_STEP)
    for number in range(5):
        writer.step((number, number + 0.5, number, *dataclasses.astuple(SHAPE)[1:]))
    writer.milestone(MilestoneKind.ENDED, 9, 4.0, tokens=3)
    seen = reader.read()
    assert [step.features.new_tokens for step in seen.steps] == [0, 1, 2, 3, 4]
    assert seen.steps[4] == FinishedStep(4.0, 4.5, dataclasses.replace(SHAPE, new_tokens=4))
    assert seen.milestones == (Milestone(MilestoneKind.ENDED, 9, 4.0, 3),)
    again = reader.read()
    assert (again.steps, again.milestones, again.lost) == ((), (), 0)


def test_overwritten_records_are_counted_as_lost(writer: SegmentWriter, reader: SegmentReader) -> None:
    writer.view(0.0, [], [], 0, NO_STEP)
    for number in range(STEPS_KEPT + 100):
        writer.step((number, number + 0.5, *dataclasses.astuple(SHAPE)))
    seen = reader.read()
    assert len(seen.steps) + seen.lost == STEPS_KEPT + 100
    assert seen.lost >= 100
    assert seen.steps[-1].began_s == STEPS_KEPT + 99


def test_skipped_records_are_not_read_but_arrivals_are_known(writer: SegmentWriter, reader: SegmentReader) -> None:
    writer.view(0.0, [], [], 0, NO_STEP)
    writer.step((0.0, 0.5, *dataclasses.astuple(SHAPE)))
    writer.milestone(MilestoneKind.ARRIVED, 1, 0.7, tokens=20)
    reader.skip()
    seen = reader.read()
    assert (seen.steps, seen.milestones, seen.lost) == ((), (), 0)
    assert seen.view.waiting == (WaitingRequest(0.7, 20),)
    writer.step((1.0, 1.5, *dataclasses.astuple(SHAPE)))
    assert [step.began_s for step in reader.read().steps] == [1.0]


def test_the_begin_of_a_running_step_is_published(writer: SegmentWriter, reader: SegmentReader) -> None:
    assert reader.busy_since_s == math.inf
    writer.busy_since(12.5)
    assert reader.busy_since_s == 12.5
    writer.busy_since(0.0)
    assert reader.busy_since_s == math.inf


def test_silence_is_stale_only_if_there_is_work(writer: SegmentWriter, reader: SegmentReader) -> None:
    writer.view(100.0, [], [], 0, NO_STEP)
    assert reader.why_unreliable(reader.read(), 100.0 + 1e6) == ""
    writer.view(100.0, [], [100.0, 5, 99.0, 100.0, 1], 0, NO_STEP)
    assert reader.why_unreliable(reader.read(), 100.0 + 0.9 * STALE_S) == ""
    assert "silent" in reader.why_unreliable(reader.read(), 100.0 + 1.1 * STALE_S)


def test_a_writer_that_stopped_publishes_its_reason(writer: SegmentWriter, reader: SegmentReader) -> None:
    writer.view(1.0, [], [], 0, NO_STEP)
    assert reader.stop_reason == ""
    writer.publish_stop("KeyError: 'x'" + "!" * 5000)
    assert "KeyError: 'x'" in reader.why_unreliable(reader.read(), 1.0)


WRITE_ONE = """
import sys, time
from pathlib import Path
from rose.vllm.status_segment import SegmentWriter, own_header
sizes = dict.fromkeys(("step_tokens", "sequences", "kv_blocks", "block_bytes", "block_tokens"), 1)
writer = SegmentWriter(Path(sys.argv[1]), own_header("e", "m", **sizes))
writer.view(time.monotonic(), [], [], 0)
print("shown", flush=True)
sys.stdin.read()
"""


WRITE_FAST = """
import sys
from pathlib import Path
from rose.core.observed_engine import MilestoneKind
from rose.vllm.status_segment import SegmentWriter, own_header
sizes = dict.fromkeys(("step_tokens", "sequences", "kv_blocks", "block_bytes", "block_tokens"), 1)
writer = SegmentWriter(Path(sys.argv[1]), own_header("e", "m", **sizes))
print("shown", flush=True)
for number in range(1, 40_000):
    count = 1 + number % 50
    shape = (number, number, number, number)
    step = (number, number, *shape)
    writer.view(number, [number] * (2 * count), [0.0, *[number] * 4] * count, number, step)
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


def test_a_segment_of_a_killed_writer_is_dead(path: Path) -> None:
    process = start(WRITE_ONE, path)
    reader = SegmentReader(path)
    assert reader.why_unreliable(reader.read(), 0.0) == ""
    process.kill()
    process.wait()
    assert reader.why_unreliable(reader.read(), 0.0) == "the serving engine is gone"
    with pytest.raises(Unavailable, match="gone"):
        SegmentReader(path)
    reader.close()


def test_a_reused_process_id_is_not_taken_for_the_writer(path: Path) -> None:
    writer = SegmentWriter(path, header(started=1))
    with pytest.raises(Unavailable, match="gone"):
        SegmentReader(path)
    writer.close()


def test_a_reader_beside_a_fast_writer_never_sees_half_a_view(path: Path) -> None:
    process = start(WRITE_FAST, path)
    reader = SegmentReader(path)
    views = steps = lost = newest = 0
    while process.poll() is None:
        try:
            seen = reader.read()
        except Torn:
            continue
        if seen is None:
            continue
        assert seen.view.number >= newest
        views, newest, lost = views + (seen.view.number > newest), seen.view.number, lost + seen.lost
        number, again = divmod(newest + 2, 3)
        assert {one.tokens_left for one in seen.view.waiting} == {number}
        assert {one.last_token_s for one in seen.view.running} == {seen.written_s} == {number + again / 4}
        assert {(one.context_tokens, one.tokens) for one in seen.view.running} == {(number + again, number + again)}
        assert {one.first_token_s for one in seen.view.running} == {number}
        assert len(seen.view.running) == len(seen.view.waiting) == 1 + number % 50
        assert seen.view.last_step == StepFeatures(number, number, number, number)
        for step in seen.steps:
            assert step.features.kv_read_tokens == step.began_s == int(step.ended_s)
        steps += len(seen.steps) + len(seen.milestones)
    assert views > 10
    assert steps + lost > views
    reader.close()


def test_a_new_segment_replaces_an_old_one_at_once(path: Path, reader: SegmentReader, writer: SegmentWriter) -> None:
    writer.view(1.0, [], [], 0, NO_STEP)
    other = SegmentWriter(path, header(boot="another"))
    assert reader.read() is not None, "who has the old one keeps it"
    assert SegmentReader(path).header.boot == "another"
    other.close()


def test_a_file_that_is_no_segment_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no status segment"):
        SegmentReader(tmp_path / "nowhere")
    path.write_bytes(b"\1" * 5000)
    with pytest.raises(Unavailable, match="not a status segment"):
        SegmentReader(path)
    SegmentWriter(path, header(layout=99))
    with pytest.raises(Unavailable, match="layout 99"):
        SegmentReader(path)


def test_pages_are_published_and_only_a_greater_wish_is_an_event(writer: SegmentWriter, reader: SegmentReader) -> None:
    assert reader.pages == (0, 0, 0)
    writer.pages(held=8, used=4, asked=2)
    assert (reader.pages, reader.short.number) == ((8, 4, 2), 1)
    writer.pages(8, 4, 2)
    writer.pages(8, 4, 1)
    assert (reader.pages, reader.short.number) == ((8, 4, 1), 1)
    writer.pages(8, 4, 3)
    assert reader.short.number == 2


def test_serving_reads_what_rollouts_want_until_it_is_over(writer: SegmentWriter, reader: SegmentReader) -> None:
    assert writer.wanted_pages(10.0) == 0
    reader.want(5, until_s=12.0, now_s=10.0)
    assert (writer.wanted_pages(10.0), writer.wanted.number) == (5, 1)
    assert writer.wanted_pages(12.0) == 0
    reader.want(2, until_s=14.0, now_s=12.0)
    assert (writer.wanted_pages(12.0), writer.wanted.number) == (2, 2)


@pytest.mark.parametrize("wanted", [math.nan, math.inf, -1.0, 1e300])
def test_a_number_of_wanted_pages_that_is_none_is_ignored(
    writer: SegmentWriter, reader: SegmentReader, wanted: float
) -> None:
    reader.want(1, until_s=12.0, now_s=10.0)
    reader._page.floats[status_segment.WANTED_PLACE] = wanted
    assert writer.wanted_pages(10.0) == 0
