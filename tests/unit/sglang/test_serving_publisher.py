"""The hooks of a serving engine publish, and a failure in them never reaches serving."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit import sglang_stubs
from tests.unit.sglang_stubs import StubReq, StubScheduler

from rose.sglang.plugin import SCHEDULER
from rose.vllm import discovery
from rose.vllm.status_segment import SegmentReader


class Serving:
    """A stub scheduler whose methods go through the registered hooks, as SGLang's registry makes them do."""

    def __init__(self, modules: SimpleNamespace) -> None:
        modules.serving_publisher.register_hooks()
        self._hooks = modules.registry.hooks
        self.scheduler = StubScheduler()
        self.call("run_event_loop")

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        hook, kind = self._hooks[f"{SCHEDULER}.{method}"]
        plain = getattr(StubScheduler, method)
        if kind == "around":
            return hook(plain, self.scheduler, *arguments, **named)
        if kind == "before":
            assert hook(self.scheduler, *arguments, **named) is None
            return plain(self.scheduler, *arguments, **named)
        result = plain(self.scheduler, *arguments, **named)
        assert hook(result, self.scheduler, *arguments, **named) is None
        return result

    def turn(self) -> Any:
        scheduler = self.scheduler
        plan = self.call("get_next_batch_to_run", scheduler.running_batch, scheduler.last_batch)
        scheduler.running_batch, scheduler.last_batch = plan.running_batch, plan.batch_to_run
        if plan.batch_to_run:
            self.call("process_batch_result", plan.batch_to_run, None)
        return plan.batch_to_run


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path / "boards"))
    return sglang_stubs.install(monkeypatch)


def test_steps_and_requests_of_a_scheduler_are_published(modules: SimpleNamespace) -> None:
    serving = Serving(modules)
    [(path, header)] = discovery.live_segments()
    assert (header.engine, header.model, header.kv_blocks, header.block_bytes) == ("sglang 0.5.23", "served", 1000, 8)
    reader = SegmentReader(path)
    serving.call("_add_request_to_queue", StubReq("a"))
    for _ in range(3):
        serving.turn()
    change = reader.read()
    assert change is not None and len(change.steps) == 3
    assert [one.tokens for one in change.view.running] == [3]
    serving.turn()
    assert serving.turn() is None
    change = reader.read()
    assert change is not None and change.view.is_idle


def test_only_the_first_rank_publishes(modules: SimpleNamespace) -> None:
    modules.parallel.tp_rank = 1
    serving = Serving(modules)
    serving.call("_add_request_to_queue", StubReq("a"))
    assert serving.turn() is not None and discovery.live_segments() == []


def test_an_engine_that_cannot_be_lent_serves_all_the_same(modules: SimpleNamespace) -> None:
    modules.parallel.pp_size = 2
    serving = Serving(modules)
    serving.call("_add_request_to_queue", StubReq("a"))
    assert serving.turn() is not None and discovery.live_segments() == []


def test_a_failure_ends_publishing_and_not_serving(modules: SimpleNamespace) -> None:
    serving = Serving(modules)
    [(path, _)] = discovery.live_segments()
    reader = SegmentReader(path)
    serving.scheduler.token_to_kv_pool_allocator = None  # what it reads is not there any more
    serving.call("_add_request_to_queue", StubReq("a"))
    assert serving.turn() is not None and serving.turn() is not None
    assert "AttributeError" in reader.stop_reason


def test_a_request_that_left_its_queue_is_gone(modules: SimpleNamespace) -> None:
    serving = Serving(modules)
    request = StubReq("a")
    serving.call("_add_request_to_queue", request)
    serving.scheduler.waiting_queue.remove(request)
    serving.call("_release_aborted_request", request)
    assert serving.scheduler.rose_writer._followed == {}
