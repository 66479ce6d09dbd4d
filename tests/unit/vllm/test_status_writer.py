"""What of a vLLM scheduler is shown: by objects that have the fields of vLLM's, driven like its own."""

from __future__ import annotations

import heapq
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.unit.vllm.test_status_segment import header

from rose.core.facts import RunningRequest, StepFeatures
from rose.core.observed_engine import MilestoneKind
from rose.vllm.status_segment import WAITING_SHOWN, SegmentReader, SegmentWriter
from rose.vllm.status_writer import StatusWriter, features_of


class FakeRequest:
    def __init__(self, name: str, prompt_tokens: int, arrival_time: float, max_tokens: int) -> None:
        self.request_id, self.num_prompt_tokens, self.arrival_time = name, prompt_tokens, arrival_time
        self.max_tokens = max_tokens
        self._output_token_ids: list[int] = []
        self._all_token_ids = [0] * prompt_tokens
        self.num_computed_tokens = 0
        self.places_kept = 0  # for tokens of steps under way
        self.first_s = self.last_s = 0.0
        self.is_resumed, self.num_preemptions = False, 0


class FakeScheduler:
    """Steps as vLLM does: everybody who runs gets a token or a chunk, then who waits.

    The next step may be scheduled before the output of the last one is taken, as in asynchronous scheduling.
    """

    def __init__(self, publisher: StatusWriter) -> None:
        self.publisher = publisher
        self.running: list[FakeRequest] = []
        self.waiting: deque[FakeRequest] = deque()
        self.kv_holding_waiting: deque[FakeRequest] = deque()
        self.requests: dict[str, FakeRequest] = {}
        self.finished_req_ids: set[str] = set()
        self.is_tight = False
        self.shapes: deque[StepFeatures] = deque()  # of steps under way
        self.finished: list[StepFeatures] = []
        pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 90)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def add(self, request: FakeRequest) -> None:
        self.waiting.append(request)
        self.requests[request.request_id] = request
        self.publisher.on_arrival(request)

    def abort(self, request: FakeRequest) -> None:
        del self.requests[request.request_id]
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.publisher.on_cancelled([request])

    def preempt(self, request: FakeRequest) -> None:
        self.running.remove(request)
        request.num_computed_tokens = request.places_kept = 0
        request.is_resumed = self.is_tight = True
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def schedule(self, began_s: float, tokens: int = 64) -> dict[str, int]:
        """Nobody is begun in a step that follows a preemption."""
        counts: dict[str, int] = {}
        self.finished_req_ids = set()
        waiting = 0 if self.is_tight else len(self.waiting)
        for place in range(min(8, len(self.running) + waiting)):
            if tokens == 0:
                break
            if place == len(self.running):
                self.running.append(self.waiting.popleft())
            tokens -= self._advance(self.running[place], counts, tokens)
        self.is_tight = False
        self.publisher.on_scheduled(began_s, counts, self)
        if counts:
            self.shapes.append(features_of(counts, self.requests))
        return counts

    def _advance(self, request: FakeRequest, counts: dict[str, int], tokens: int) -> int:
        whole = len(request._all_token_ids) + request.places_kept
        count = min(tokens, whole - request.num_computed_tokens)
        if count > 0:
            counts[request.request_id] = count
            request.num_computed_tokens += count
            request.places_kept += request.num_computed_tokens == whole
        return count

    def update(self, counts: dict[str, int], now_s: float = 0.0) -> None:
        if counts:
            self.finished.append(self.shapes.popleft())
        for request in [self.requests[name] for name in counts if name in self.requests]:
            if request.num_computed_tokens >= len(request._all_token_ids) and request.places_kept:
                request.places_kept -= 1
                request.last_s, request.is_resumed = now_s, False
                request.first_s = request.first_s or now_s
                request._output_token_ids.append(7)
                request._all_token_ids.append(7)
                if len(request._output_token_ids) == request.max_tokens:
                    self.running.remove(request)
                    del self.requests[request.request_id]
                    self.finished_req_ids.add(request.request_id)
        self.publisher.on_finished(self, counts)


class Stage:
    """A fake scheduler, its board, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now_s, self.wall_s = 100.0, 5000.0
        self.writer = SegmentWriter(folder / "b.board", header())
        self.reader = SegmentReader(folder / "b.board")
        publisher = StatusWriter(self.writer, now_s=lambda: self.now_s, wall_s=lambda: self.wall_s)
        self.scheduler = FakeScheduler(publisher)
        self.under_way: deque[dict[str, int]] = deque()
        self.shapes_seen: list[StepFeatures] = []

    def add(self, name: str, prompt: int = 10, max_tokens: int = 5, ago_s: float = 0.0) -> FakeRequest:
        request = FakeRequest(name, prompt, self.wall_s - ago_s, max_tokens)
        self.scheduler.add(request)
        return request

    def step(self, seconds: float = 0.5, tokens: int = 64, ahead: int = 0) -> Any:
        """`ahead`: how many steps are under way behind the one whose output is taken."""
        counts = self.scheduler.schedule(self.now_s, tokens)
        self.under_way.append(counts)
        while len(self.under_way) > (ahead if counts else 0):
            self.now_s += seconds
            self.scheduler.update(self.under_way.popleft(), self.now_s)
        seen = self.reader.read()
        self.shapes_seen += [step.features for step in seen.steps]
        return seen

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@pytest.fixture
def stage(tmp_path: Path):
    made = Stage(tmp_path)
    yield made
    made.close()


def test_the_milestones_and_rows_of_one_request(stage: Stage) -> None:
    stage.add("a", prompt=10, max_tokens=3, ago_s=0.25)
    first = stage.step()
    assert [(m.kind, m.at_s, m.tokens) for m in first.milestones] == [
        (MilestoneKind.ARRIVED, 99.75, 10),
        (MilestoneKind.FIRST_TOKEN, 100.5, 0),
    ]
    (running,) = first.view.running
    assert running == RunningRequest(100.5, 10, 99.75, 100.5, 1)
    assert first.view.last_step == StepFeatures(10, 10, 55, 1)
    assert first.view.kv_used_bytes == 10 * 1000
    second = stage.step()
    assert second.view.running == (RunningRequest(101.0, 11, 99.75, 100.5, 2),)
    last = stage.step()
    assert last.view.is_idle
    assert [(m.kind, m.at_s, m.tokens) for m in last.milestones] == [(MilestoneKind.ENDED, 101.5, 3)]
    assert [step.seconds for step in (*first.steps, *second.steps, *last.steps)] == [0.5, 0.5, 0.5]


def test_a_step_scheduled_ahead_begins_when_the_other_ends(stage: Stage) -> None:
    """Asynchronous scheduling: the next step is scheduled while one runs."""
    stage.add("a", max_tokens=9)
    stage.step()
    scheduler = stage.scheduler
    one = scheduler.schedule(stage.now_s)
    two = scheduler.schedule(stage.now_s + 0.1)
    assert stage.reader.busy_since_s == stage.now_s
    stage.now_s += 0.5
    scheduler.publisher.on_finished(scheduler, one)
    assert stage.reader.busy_since_s == stage.now_s
    stage.now_s += 0.3
    scheduler.publisher.on_finished(scheduler, two)
    steps = stage.reader.read().steps
    assert [round(step.seconds, 6) for step in steps[-2:]] == [0.5, 0.3]
    assert stage.reader.busy_since_s == float("inf")


def test_an_aborted_request_is_gone(stage: Stage) -> None:
    request = stage.add("a")
    stage.step()
    stage.scheduler.abort(request)
    seen = stage.step()
    assert [m.kind for m in seen.milestones] == [MilestoneKind.CANCELLED]
    assert seen.view.is_idle
    assert seen.steps == (), "a step of nothing is none"


def test_a_preempted_request_waits_with_all_its_tokens(stage: Stage) -> None:
    request = stage.add("a", prompt=10, max_tokens=50)
    for _ in range(3):
        stage.step()
    stage.scheduler.preempt(request)
    stage.scheduler.publisher.on_finished(stage.scheduler, {})
    (waiting,) = stage.reader.read().view.waiting
    assert waiting.tokens_left == 13


def test_a_priority_queue_is_read_without_sorting(stage: Stage) -> None:
    class Queue:
        def __init__(self) -> None:
            self._heap: list[Any] = []

        def __len__(self) -> int:
            return len(self._heap)

    queue = Queue()
    request = stage.add("a", prompt=33)
    stage.scheduler.waiting.clear()
    heapq.heappush(queue._heap, request)
    stage.scheduler.waiting = queue  # type: ignore[assignment]
    stage.scheduler.publisher.on_finished(stage.scheduler, {})
    assert stage.reader.read().view.waiting[0].tokens_left == 33


def test_steps_without_changes_write_no_view(stage: Stage) -> None:
    stage.add("a", max_tokens=50)
    stage.add("b", max_tokens=50)
    stage.step()
    slot, before = stage.writer._view_slot, stage.reader.read().view
    for _ in range(5):
        stage.step()
    after = stage.reader.read().view
    assert stage.writer._view_slot == slot
    assert after.number == before.number + 5
    assert [(one.context_tokens, one.tokens) for one in after.running] == [
        (one.context_tokens + 5, one.tokens + 5) for one in before.running
    ]
    assert {(one.first_token_s, one.last_token_s) for one in after.running} == {(100.5, stage.now_s)}


def test_an_arrival_without_a_new_view_is_seen_as_waiting(stage: Stage) -> None:
    for name in "abcdefgh":
        stage.add(name, prompt=2, max_tokens=50)
    stage.step()
    slot = stage.writer._view_slot
    stage.add("late", prompt=30, ago_s=0.125)
    seen = stage.step()
    assert stage.writer._view_slot == slot
    assert [(one.arrival_s, one.tokens_left) for one in seen.view.waiting] == [(100.375, 30)]


def shown(seen: Any) -> list[tuple[float, int, int]]:
    return sorted((one.last_token_s, one.context_tokens, one.tokens) for one in seen.view.running)


def test_a_request_left_out_of_a_step_keeps_its_last_token_time(stage: Stage) -> None:
    stage.add("a", max_tokens=50)
    stage.add("b", max_tokens=50)
    stage.step()
    seen = stage.step(tokens=1)
    assert shown(seen) == [(100.5, 10, 1), (101.0, 11, 2)]
    seen = stage.step(tokens=1)
    assert shown(seen) == [(100.5, 10, 1), (101.5, 12, 3)]
    assert {one.last_token_s for one in stage.step().view.running} == {102.0}


def test_waiting_rows_are_refilled_before_they_run_out(stage: Stage) -> None:
    for number in range(3 * WAITING_SHOWN):
        stage.add(f"r{number}", prompt=64, max_tokens=1)
    stage.scheduler.publisher._waiting.remove("r0")  # as if it had been lost: all are listed anew
    left = 3 * WAITING_SHOWN
    while left:
        seen, left = stage.step(), left - 1
        assert min(left, WAITING_SHOWN // 2) <= len(seen.view.waiting)


def test_a_request_that_ends_outside_a_step_is_gone(stage: Stage) -> None:
    """As vLLM ends a request whose KV blocks could not be fetched."""
    stage.add("a", max_tokens=50)
    stage.step()
    scheduler = stage.scheduler
    scheduler.running.clear()
    scheduler.requests.clear()
    scheduler.publisher.on_finished(scheduler, {})
    seen = stage.reader.read()
    assert [one.kind for one in seen.milestones] == [MilestoneKind.CANCELLED]
    assert seen.view.is_idle


def test_features_of_a_mixed_step() -> None:
    decode, chunk = FakeRequest("d", 5, 0.0, 9), FakeRequest("c", 50, 0.0, 9)
    decode.num_computed_tokens, chunk.num_computed_tokens = 6, 20
    shape = features_of({"d": 1, "c": 10}, {"d": decode, "c": chunk})
    assert shape == StepFeatures(11, 26, 6 + 10 * 10 + 55, 2)


class ShowsWhatIs(RuleBasedStateMachine):
    """Whatever comes, ends, is aborted, preempted or left out: the board shows what the scheduler holds."""

    folder: Path

    @initialize(ahead=st.integers(0, 1))
    def begins(self, ahead: int) -> None:
        self.stage, self.ahead, self.names = Stage(self.folder), ahead, 0

    @rule(prompt=st.integers(1, 100), max_tokens=st.integers(1, 12), ago_s=st.floats(0, 1))
    def comes(self, prompt: int, max_tokens: int, ago_s: float) -> None:
        self.names += 1
        self.stage.add(f"r{self.names}", prompt, max_tokens, ago_s)

    @rule(times=st.integers(1, 6), tokens=st.sampled_from([64, 64, 64, 5, 1]))
    def steps(self, times: int, tokens: int) -> None:
        for _ in range(times):
            self.stage.step(tokens=tokens, ahead=self.ahead)

    @rule(which=st.integers(0, 50))
    def aborted(self, which: int) -> None:
        here = list(self.stage.scheduler.requests.values())
        if here:
            self.stage.scheduler.abort(here[which % len(here)])
            self.steps(1 + self.ahead, 64)

    @rule(which=st.integers(0, 50))
    def preempted(self, which: int) -> None:
        running = self.stage.scheduler.running
        if running:
            self.stage.scheduler.preempt(running[which % len(running)])
            self.steps(1 + self.ahead, 64)

    @invariant()
    def shown(self) -> None:
        seen, scheduler = self.stage.reader.read(), self.stage.scheduler
        if seen is None:
            return
        begun = [r for r in scheduler.running if r._output_token_ids and not r.is_resumed]
        decoding = [r for r in begun if len(r._all_token_ids) - r.num_computed_tokens <= 1]
        assert len(seen.view.waiting) + len(seen.view.running) == len(scheduler.requests)
        contexts = sorted(one.context_tokens for one in seen.view.running)
        computed = sorted(r.num_computed_tokens for r in decoding)
        assert len(contexts) == len(computed)
        # Of a step that is scheduled ahead without somebody nothing is known before its output is taken.
        assert all(abs(one - other) <= self.ahead for one, other in zip(contexts, computed, strict=True))
        said = sorted((one.first_token_s, one.tokens) for one in seen.view.running)
        made = sorted((r.first_s, len(r._output_token_ids)) for r in decoding)
        if not self.ahead:
            assert sorted(one.last_token_s for one in seen.view.running) == sorted(r.last_s for r in decoding)
            assert said == made
        assert [first_s for first_s, _ in said] == [first_s for first_s, _ in made]
        assert all(one.last_token_s <= self.stage.now_s for one in seen.view.running)
        assert len(self.stage.shapes_seen) == len(scheduler.finished)
        for one, other in zip(self.stage.shapes_seen, scheduler.finished, strict=True):
            assert (one.new_tokens, one.sequences) == (other.new_tokens, other.sequences)
            assert abs(one.kv_read_tokens - other.kv_read_tokens) <= self.ahead * one.sequences
            assert abs(one.new_by_context - other.new_by_context) <= self.ahead * one.sequences

    def teardown(self) -> None:
        self.stage.close()


def test_the_segment_shows_what_the_scheduler_holds(tmp_path: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    ShowsWhatIs.folder = tmp_path
    run_state_machine_as_test(ShowsWhatIs, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
