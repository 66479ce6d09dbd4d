"""A serving engine takes free pages at once, asks for what rollouts hold, and gives back what they would use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.pooled_engine import GROUP_PAGES, GROUPS, PooledEngine
from tests.unit.vllm_stubs import StubRequest

from rose.errors import Unavailable
from rose.vllm import serving_memory
from rose.vllm.serving_memory import CALM_S, HAND_OVER_S, PATIENCE_S, RETRY_S, ServingMemory
from rose.vllm.status_segment import SegmentReader, SegmentWriter, own_header


class Serving(PooledEngine):
    """A serving engine on a pool, with its status segment and a clock."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        header = own_header("vllm", "m", step_tokens=1, sequences=1, kv_blocks=1, block_bytes=1, block_tokens=16)
        self.now_s = 100.0
        self.memory = ServingMemory(self.kv, self.scheduler, now_s=lambda: self.now_s)
        self.writer = self.memory.writer = SegmentWriter(path, header)
        self.reader = SegmentReader(path)

    def step(self) -> None:
        self.memory.before_step()
        super().step()
        self.memory.publish()


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    made = Serving(tmp_path / "segment")

    def sleep(seconds: float) -> None:
        made.now_s += seconds

    monkeypatch.setattr(serving_memory.time, "sleep", sleep)
    yield made
    made.reader.close()
    made.writer.close()


def test_a_prompt_takes_the_groups_it_needs_and_asks_for_nothing(serving: Serving) -> None:
    serving.run("a", blocks=10)
    assert serving.kv.balloon.present == [0, 1]
    assert serving.reader.pages == (2 * GROUP_PAGES, 2 * GROUP_PAGES, 0)


def test_free_pages_are_taken_rather_than_the_prefix_cache_overwritten(serving: Serving) -> None:
    serving.run("a", blocks=5)
    serving.step()
    serving.scheduler.finish_requests("a", "aborted")
    serving.run("b", blocks=5)
    assert serving.kv.balloon.present == [0, 1] and serving.kv.balloon.cached == 5
    serving.scheduler.finish_requests("b", "aborted")
    serving.reader.want(1, serving.now_s + 10, serving.now_s)
    serving.run("c", blocks=5)
    assert serving.kv.balloon.present == [0, 1], "rollouts would use the pages"


def test_pages_that_rollouts_hold_are_asked_for_once_and_waited_for(serving: Serving) -> None:
    serving.worker.free_groups = 0
    number = serving.reader.short.number
    serving.scheduler.add_request(StubRequest("large", prompt_tokens=200))
    serving.step()
    serving.step()
    assert serving.scheduler.running == [], "it waits, as in a full engine"
    assert serving.reader.pages == (GROUP_PAGES, GROUP_PAGES, 2 * GROUP_PAGES), "14 blocks, of which 5 are free"
    assert serving.reader.short.number == number + 1
    serving.worker.free_groups = 2
    serving.step()
    assert len(serving.scheduler.running) == 1 and serving.reader.pages[2] == 0


def test_nothing_is_asked_for_once_the_requests_are_gone(serving: Serving) -> None:
    serving.worker.free_groups = 0
    serving.scheduler.add_request(StubRequest("large", prompt_tokens=200))
    serving.step()
    serving.scheduler.finish_requests("large", "aborted")
    serving.memory.publish()
    assert serving.reader.pages[2] == 0


def test_a_running_request_waits_for_pages_a_moment_and_then_not_again(serving: Serving) -> None:
    request = serving.run("a", blocks=5)
    serving.worker.free_groups = 0
    serving.scheduler.kv_cache_manager.block_pool.use(serving.kv.balloon.free)
    began_s = serving.now_s
    request._all_token_ids += [7] * 40
    serving.step()
    assert serving.now_s - began_s == pytest.approx(HAND_OVER_S, abs=0.01)
    serving.step()
    assert serving.now_s - began_s == pytest.approx(HAND_OVER_S, abs=0.01), "a stopped engine slows down one step"
    serving.now_s += PATIENCE_S
    serving.step()
    assert serving.now_s - began_s == pytest.approx(PATIENCE_S + 2 * HAND_OVER_S, abs=0.02)


def test_a_running_request_goes_on_once_the_pages_come(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    request = serving.run("a", blocks=5)
    serving.worker.free_groups = 0
    serving.scheduler.kv_cache_manager.block_pool.use(serving.kv.balloon.free)
    request._all_token_ids += [7] * 40
    before = len(serving.kv.balloon.present)
    monkeypatch.setattr(serving_memory.time, "sleep", lambda seconds: setattr(serving.worker, "free_groups", 1))
    serving.step()
    assert request.num_computed_tokens == 120 and len(serving.kv.balloon.present) == before + 1


def test_groups_that_rollouts_would_use_are_given_back_but_one(serving: Serving) -> None:
    serving.run("a", blocks=20)
    serving.scheduler.finish_requests("a", "aborted")
    assert len(serving.kv.balloon.present) == 4
    serving.memory.give_back_unused()
    assert len(serving.kv.balloon.present) == 4, "rollouts do not want them"
    serving.reader.want(100, serving.now_s + 10, serving.now_s)
    serving.memory.give_back_unused()
    assert len(serving.kv.balloon.present) == 4, "it has just grown"
    serving.now_s += CALM_S
    serving.memory.give_back_unused()
    assert len(serving.kv.balloon.present) == 2 and serving.worker.mapped == set(serving.kv.balloon.present)


def test_a_wish_that_is_over_is_ignored(serving: Serving) -> None:
    serving.run("a", blocks=20)
    serving.scheduler.finish_requests("a", "aborted")
    serving.reader.want(100, serving.now_s + 1, serving.now_s)
    serving.now_s += CALM_S + 1
    serving.memory.give_back_unused()
    assert len(serving.kv.balloon.present) == 4


def test_an_error_ends_lending_and_not_serving(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    serving.worker.failure = Unavailable("the device refuses")
    serving.scheduler.add_request(StubRequest("large", prompt_tokens=200))
    with caplog.at_level(logging.ERROR, logger="vllm.rose"):
        serving.step()
        serving.step()
    assert [record.message for record in caplog.records] == [caplog.messages[0]], "logged once"
    assert "serving goes on" in caplog.messages[0]
    assert "the device refuses" in serving.reader.stop_reason
    serving.worker.failure = None
    serving.now_s += RETRY_S
    serving.step()
    assert len(serving.scheduler.running) == 1


def test_an_engine_without_a_segment_grows_all_the_same(serving: Serving) -> None:
    serving.memory.writer = None
    serving.run("a", blocks=(GROUPS - 1) * 6)
    assert len(serving.kv.balloon.present) == GROUPS
