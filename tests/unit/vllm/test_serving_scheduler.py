"""A serving engine publishes what it does, and an error in publishing never reaches it."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit import vllm_stubs
from tests.unit.pooled_engine import GROUP_BLOCKS, GROUP_PAGES, GROUPS, PAGE_BYTES, PLAN
from tests.unit.vllm_stubs import BLOCK_BYTES, BLOCK_TOKENS, StubRequest, StubWorker

from rose.core.observed_engine import MilestoneKind
from rose.errors import ConfigError
from rose.vllm import discovery
from rose.vllm.status_segment import SegmentReader


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path / "segments"))
    return vllm_stubs.install(monkeypatch)["serving_scheduler"]


@pytest.fixture
def scheduler(module: Any) -> Iterator[Any]:
    made = module.ServingScheduler()
    yield made
    made.shutdown()


@pytest.fixture
def reader(scheduler: Any) -> Iterator[SegmentReader]:
    [(path, _)] = discovery.live_segments()
    opened = SegmentReader(path)
    yield opened
    opened.close()


def step(scheduler: Any) -> Any:
    output = scheduler.schedule()
    return scheduler.update_from_output(output, None)


def test_the_header_has_the_sizes_of_the_engine(reader: SegmentReader) -> None:
    header = reader.header
    assert (header.engine, header.model) == ("vllm 0.32.0", "served")
    assert (header.step_tokens, header.sequences, header.kv_blocks) == (256, 8, 100)
    assert (header.block_bytes, header.block_tokens) == (BLOCK_BYTES, BLOCK_TOKENS), "a shared allocation counts once"


def test_requests_and_steps_are_published(scheduler: Any, reader: SegmentReader) -> None:
    scheduler.add_request(StubRequest("a"))
    scheduler.add_request(StubRequest("b"))
    step(scheduler)
    seen = reader.read()
    assert seen is not None and len(seen.view.running) == 2 and len(seen.steps) == 1
    assert seen.steps[0].features.new_tokens == 16
    scheduler.finish_requests("a", "aborted")
    step(scheduler)
    seen = reader.read()
    assert seen is not None and len(seen.view.running) == 1
    assert [milestone.kind for milestone in seen.milestones] == [MilestoneKind.CANCELLED]


def test_an_error_in_publishing_ends_it_and_not_serving(
    scheduler: Any, reader: SegmentReader, caplog: pytest.LogCaptureFixture
) -> None:
    broken = StubRequest("broken")
    del broken.arrival_time
    with caplog.at_level(logging.ERROR, logger="vllm.rose"):
        scheduler.add_request(broken)
    assert "publishes nothing any more" in caplog.messages[0]
    assert "broken" in scheduler.requests
    assert reader.stop_reason.startswith("AttributeError")
    assert step(scheduler), "serving goes on"


def test_an_engine_without_a_segment_serves_and_is_not_lent(
    module: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "segments").touch()
    with caplog.at_level(logging.ERROR, logger="vllm.rose"):
        scheduler = module.ServingScheduler()
    assert "will not be lent" in caplog.messages[0]
    scheduler.add_request(StubRequest("a"))
    assert step(scheduler)


def test_a_shutdown_removes_the_segment(module: Any) -> None:
    scheduler = module.ServingScheduler()
    assert len(discovery.live_segments()) == 1
    scheduler.shutdown()
    assert discovery.live_segments() == [] and scheduler.was_shut_down


def test_the_scheduler_of_the_other_kind_of_scheduling_is_refused(module: Any) -> None:
    with pytest.raises(ConfigError, match="AsyncServingScheduler"):
        module.ServingScheduler(is_async=True)
    with pytest.raises(ConfigError, match=r"rose\.vllm\.ServingScheduler"):
        module.AsyncServingScheduler(is_async=False)


def test_an_engine_on_a_pool_publishes_its_pool_and_takes_what_a_request_needs(module: Any) -> None:
    scheduler = module.ServingScheduler(blocks=GROUP_BLOCKS * GROUPS, plan=PLAN)
    [(path, header)] = discovery.live_segments()
    assert (header.pool, header.pool_pages, header.page_bytes) == (PLAN.folder, GROUPS * GROUP_PAGES, PAGE_BYTES)
    assert (header.group_pages, header.group_blocks) == (GROUP_PAGES, GROUP_BLOCKS)
    worker = StubWorker(free_groups=GROUPS - 1)
    scheduler.attach(SimpleNamespace(model_executor=worker, input_queue=queue.Queue()))
    scheduler.add_request(StubRequest("a", prompt_tokens=10 * BLOCK_TOKENS))
    step(scheduler)
    assert [request.request_id for request in scheduler.running] == ["a"] and worker.mapped >= {0, 1}
    reader = SegmentReader(path)
    seen = reader.read()
    assert seen is not None and seen.view.kv_used_bytes == 10 * BLOCK_BYTES, "held blocks are not used ones"
    held, used, asked = reader.pages
    assert (held, used, asked) == (len(worker.mapped) * GROUP_PAGES, 2 * GROUP_PAGES, 0)
    reader.close()
    scheduler.shutdown()


def test_an_idle_engine_on_a_pool_is_woken_by_rollouts_that_want_its_pages(module: Any) -> None:
    scheduler = module.ServingScheduler(blocks=GROUP_BLOCKS * GROUPS, plan=PLAN)
    inbox: queue.Queue[Any] = queue.Queue()
    scheduler.attach(SimpleNamespace(model_executor=StubWorker(GROUPS - 1), input_queue=inbox))
    assert not scheduler.has_requests()
    [(path, _)] = discovery.live_segments()
    reader, deadline_s = SegmentReader(path), time.monotonic() + 20.0
    while inbox.empty() and time.monotonic() < deadline_s:
        reader.want(2, time.monotonic() + 10, time.monotonic())
        time.sleep(0.01)
    assert inbox.get(timeout=1) == ("wake-up", None)
    reader.close()
    scheduler.shutdown()
