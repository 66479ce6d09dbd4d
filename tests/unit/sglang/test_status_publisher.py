"""What of an SGLang scheduler is published: by objects that have the fields of SGLang's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.sglang_stubs import EOS, StubBatch, StubReason, StubReq
from tests.unit.vllm.test_status_segment import header

from rose.core.facts import RunningRequest, StepFeatures, WaitingRequest
from rose.core.observed_engine import MilestoneKind
from rose.sglang.status_publisher import SglangStatusWriter
from rose.vllm.status_segment import SegmentReader, SegmentWriter, StatusChange


class World:
    """A writer with a clock of its own, and a reader."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 100.0
        self.writer = SglangStatusWriter(SegmentWriter(folder / "x.board", header()), now_s=lambda: self.now_s)
        self._reader = SegmentReader(folder / "x.board")

    def read(self) -> StatusChange:
        change = self._reader.read()
        assert change is not None
        return change

    def prefill(self, request: StubReq, end: int = 0) -> StubBatch:
        request.prefix_len, request.extend_end = request.extend_end, end or len(request.origin_input_ids)
        request.kv.holds_kv = True
        return self._planned(StubBatch([request], is_extend=True))

    def decode(self, *requests: StubReq) -> StubBatch:
        return self._planned(StubBatch(list(requests)))

    def _planned(self, batch: StubBatch) -> StubBatch:
        self.writer.on_planned(batch, self.now_s)
        return batch

    def finish(self, batch: StubBatch, *, tokens: int = 1, seconds: float = 0.5) -> None:
        self.now_s += seconds
        for one in batch.reqs:
            one.output_ids += [0] * tokens
        self.writer.on_finished(batch, 12)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_arrival_waits_at_once(world: World) -> None:
    world.writer.on_queued(StubReq("a", 9))
    change = world.read()
    assert change.view.waiting == (WaitingRequest(100.0, 9),)
    assert [one.kind for one in change.milestones] == [MilestoneKind.ARRIVED]


def test_a_request_runs_after_its_first_token_and_leaves_at_its_end(world: World) -> None:
    request = StubReq("a", 9)
    world.writer.on_queued(request)
    world.read()
    world.finish(world.prefill(request))
    change = world.read()
    assert change.view.running == (RunningRequest(100.5, 9, 100.0, 100.5, 1),) and not change.view.waiting
    assert [(one.kind, one.at_s) for one in change.milestones] == [(MilestoneKind.FIRST_TOKEN, 100.5)]
    assert [(step.seconds, step.features) for step in change.steps] == [(0.5, StepFeatures(9, 9, 45, 1))]
    batch = world.decode(request)
    request.finished_reason = StubReason(EOS)
    world.finish(batch)
    change = world.read()
    assert change.view.is_idle
    assert [(one.kind, one.tokens) for one in change.milestones] == [(MilestoneKind.ENDED, 2)]
    assert change.view.kv_used_bytes == 12 * header().block_bytes


def test_a_prompt_in_parts_waits_with_what_is_left(world: World) -> None:
    request = StubReq("a", 9)
    world.writer.on_queued(request)
    world.finish(world.prefill(request, end=4), tokens=0)
    request.prefix_len = 4
    world.writer.on_queued(other := StubReq("b", 3))
    world.finish(world.prefill(other))
    assert [one.tokens_left for one in world.read().view.waiting] == [5]


def test_a_retracted_request_waits_again(world: World) -> None:
    request = StubReq("a", 9)
    world.writer.on_queued(request)
    world.finish(world.prefill(request))
    request.prefix_len, request.kv.holds_kv = 0, False
    world.writer.on_queued(request)
    world.writer.on_nothing_planned(0, is_idle=False)
    change = world.read()
    assert change.view.waiting == (WaitingRequest(100.0, 10),) and not change.view.running
    assert [one.kind for one in change.milestones] == [MilestoneKind.ARRIVED, MilestoneKind.FIRST_TOKEN]


def test_requests_that_were_cancelled_are_gone(world: World) -> None:
    waiting, running = StubReq("a", 9), StubReq("b", 9)
    world.writer.on_queued(waiting)
    world.writer.on_queued(running)
    batch = world.prefill(running)
    running.finished_reason = StubReason("abort")
    world.finish(batch)
    world.writer.on_left(waiting)
    world.writer.on_nothing_planned(0, is_idle=False)
    change = world.read()
    assert change.view.is_idle
    assert [one.kind for one in change.milestones][-2:] == [MilestoneKind.CANCELLED] * 2


def test_a_request_that_sglang_lost_does_not_block_lending_for_ever(world: World) -> None:
    world.writer.on_queued(StubReq("a", 9))
    world.writer.on_nothing_planned(0, is_idle=True)
    assert world.read().view.is_idle


def test_a_step_that_was_planned_behind_another_begins_at_its_end(world: World) -> None:
    request = StubReq("a", 9)
    world.writer.on_queued(request)
    first = world.prefill(request)
    world.now_s += 0.1
    second = world.decode(request)
    world.finish(first, seconds=0.4)
    assert world._reader.busy_since_s == 100.5
    world.finish(second, seconds=0.2)
    assert [pytest.approx(step.seconds) for step in world.read().steps] == [0.5, 0.2]
