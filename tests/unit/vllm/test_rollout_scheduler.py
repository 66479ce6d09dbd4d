"""A rollout engine steps within the agent's grant and KV budget, and sleeps while nothing may run."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit import vllm_stubs
from tests.unit.pooled_engine import GROUP_BLOCKS, GROUP_PAGES, GROUPS, PLAN
from tests.unit.vllm_stubs import StubRequest, StubWorker

from rose.core.facts import RolloutView
from rose.errors import ConfigError
from rose.vllm.control_segment import ENGINE_FOLDER_VARIABLE, EngineControl, Segment, Status, open_control, open_status

LONG_S = 1e9


class Engine:
    """A rollout scheduler in a stub of vLLM's engine, and the agent's side of its segments."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENGINE_FOLDER_VARIABLE, str(folder))
        self.modules = vllm_stubs.install(monkeypatch)
        self.control: Segment[EngineControl] = open_control(folder, create=True)
        self.scheduler = self.modules["rollout_scheduler"].RolloutScheduler()
        self.core = self.modules["EngineCoreProc"](self.scheduler)
        self._status = open_status(folder)

    def grant(self, **changes: Any) -> None:
        plain: dict[str, Any] = {"tokens": 1 << 20, "sequences": 1 << 20, "until_s": LONG_S}
        self.control.write(EngineControl(**{**plain, **changes}))

    def attach(self) -> None:
        assert self.core._process_input_queue() == "slept"

    def add(self, name: str, **sizes: int) -> StubRequest:
        request = StubRequest(name, **sizes)
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[int, Any]:
        output = self.scheduler.schedule()
        outputs: dict[int, Any] = self.scheduler.update_from_output(output, None)
        return outputs

    @property
    def status(self) -> Status:
        status = self._status.read()[1]
        assert status is not None
        return status


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(tmp_path, monkeypatch)


def test_a_scheduler_without_an_agent_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENGINE_FOLDER_VARIABLE)
    with pytest.raises(ConfigError, match="none has started this one"):
        engine.modules["rollout_scheduler"].RolloutScheduler()


@pytest.mark.parametrize(
    "options, words", [({"is_async": True}, "AsyncRolloutScheduler"), ({"is_chunked": False}, "chunked prefill")]
)
def test_an_engine_with_the_wrong_options_is_refused(engine: Engine, options: dict[str, bool], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine.modules["rollout_scheduler"].RolloutScheduler(**options)


def test_no_step_runs_without_a_grant_and_the_engine_parks(engine: Engine) -> None:
    engine.add("a")
    assert not engine.scheduler.has_requests(), "vLLM would poll otherwise"
    assert (engine.status.state, engine.status.waiting, engine.status.gate_open) == ("parked", 1, False)
    assert engine.step() == {} and engine.status.steps == 0


def test_a_step_stays_within_the_tokens_and_sequences_of_the_grant(engine: Engine) -> None:
    engine.grant(tokens=10, sequences=2)
    for name in "abc":
        engine.add(name)
    assert engine.scheduler.has_requests()
    engine.step()
    assert engine.scheduler.limits == [(10, 2)]
    assert (engine.scheduler.max_num_scheduled_tokens, engine.scheduler.max_num_active_reqs) == (256, 8), "restored"
    status = engine.status
    assert (status.state, status.steps, status.prompt_tokens, status.generated_tokens) == ("running", 1, 10, 1)
    assert (status.running, status.waiting, status.live["a"]) == (2, 1, (0, 1))


def test_requests_left_out_of_a_step_come_first_in_the_next(engine: Engine) -> None:
    engine.grant(tokens=8, sequences=2)
    engine.add("a")
    engine.add("b")
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["b", "a"]
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["a", "b"]


def test_an_expired_grant_blocks_the_next_step(engine: Engine) -> None:
    engine.grant()
    engine.add("a")
    assert engine.step()
    engine.grant(until_s=time.monotonic() - 0.001)
    assert engine.step() == {}
    assert engine.status.why == "the agent's grant is over"


def test_only_one_step_runs_at_a_time(engine: Engine) -> None:
    engine.grant()
    engine.add("a")
    first = engine.scheduler.schedule()
    assert not engine.scheduler.has_requests()
    assert engine.scheduler.schedule().num_scheduled_tokens == {}
    engine.scheduler.update_from_output(first, None)
    assert engine.scheduler.has_requests()


def test_a_smaller_kv_budget_evicts_and_returns_memory(engine: Engine) -> None:
    engine.attach()
    engine.grant()
    for name in "ab":
        engine.add(name)
    engine.step()
    engine.scheduler.kv_cache_manager.block_pool.use(2)
    engine.grant(kv_bytes=0)
    outputs = engine.step()
    ended = [(output.request_id, output.finish_reason) for output in outputs[0].outputs]
    assert sorted(ended) == [("a", "abort"), ("b", "abort")]
    status = engine.status
    assert (status.evictions, status.evicted_tokens, status.done) == (2, 16, 2)
    assert status.kv_blocks_limit == 2, "blocks that are still referenced stay"
    assert engine.core.calls == [("return_kv_blocks", ([(3, 101)],))]
    engine.grant()
    engine.step()
    assert engine.status.kv_blocks_limit == 100


def test_a_request_that_can_never_fit_is_answered_at_once(engine: Engine) -> None:
    engine.grant(kv_bytes=3_000)
    engine.add("large", prompt_tokens=100, max_tokens=100)
    assert engine.scheduler.requests == {} and engine.scheduler.has_requests(), "its end is to be reported"
    [output] = engine.step()[0].outputs
    assert (output.request_id, output.finish_reason) == ("large", "abort")


def test_the_prefix_cache_is_salted_with_the_weight_version(engine: Engine) -> None:
    engine.attach()
    request = engine.add("a")
    request_salted = request.cache_salt
    engine.core.version = "v2"
    engine.grant(tokens=0)
    engine.step()
    assert engine.status.version == "v2"
    assert request_salted != request.cache_salt == "3:v2:" and request.block_hashes == ["3:v2:"]
    engine.grant()
    engine.step()
    engine.core.version = "v3"
    engine.step()
    assert request.cache_salt == "3:v2:", "KV that was computed keeps its salt"


def test_a_reset_of_the_prefix_cache_sees_an_empty_pool(engine: Engine) -> None:
    engine.grant(kv_bytes=50_000)
    engine.step()
    assert engine.status.kv_blocks_limit == 50
    assert engine.scheduler.reset_prefix_cache()
    engine.step()
    assert engine.status.kv_blocks_limit == 50


def test_a_parked_engine_is_woken_by_a_new_control(engine: Engine) -> None:
    engine.attach()
    engine.attach()  # vLLM calls this before every sleep
    engine.add("a")
    assert not engine.scheduler.has_requests()
    engine.grant()
    assert engine.core.input_queue.get(timeout=20) == ("wake-up", None)
    assert engine.scheduler.has_requests()


def test_an_idle_engine_applies_a_budget_and_reports_it(engine: Engine) -> None:
    engine.grant(kv_bytes=0)
    assert eventually(engine.scheduler.has_requests), "there is a budget to apply"
    engine.step()
    assert (engine.status.kv_blocks_limit, engine.status.done) == (0, 1)
    assert not engine.scheduler.has_requests() and engine.status.state == "idle"


def eventually(holds: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 20.0
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return holds()


def test_the_view_of_rollouts_counts_decoding_and_prompts(engine: Engine) -> None:
    decoding, begun, waiting = StubRequest("d"), StubRequest("b", prompt_tokens=100), StubRequest("w", prompt_tokens=7)
    decoding.num_computed_tokens, begun.num_computed_tokens = 7, 40
    view = engine.modules["rollout_scheduler"].rollout_view([decoding, begun], [waiting])
    assert view == RolloutView(decoding=1, prompt_tokens=67, context_tokens=40)


def test_an_engine_on_a_pool_reports_its_pages_and_refuses_what_cannot_fit(engine: Engine) -> None:
    scheduler = engine.modules["rollout_scheduler"].RolloutScheduler(blocks=GROUP_BLOCKS * GROUPS, plan=PLAN)
    scheduler.attach(SimpleNamespace(
        model_executor=StubWorker(GROUPS - 1), input_queue=queue.Queue(), get_weight_version=lambda: "v1"
    ))  # fmt: skip
    engine.grant()
    assert not scheduler.has_requests(), "there is a limit to adopt, and nothing to report"
    scheduler.update_from_output(scheduler.schedule(), None)
    status = open_status(Path(os.environ[ENGINE_FOLDER_VARIABLE])).read()[1]
    assert status is not None
    assert (status.pages, status.pages_max, status.memory_state) == (GROUP_PAGES, GROUP_PAGES, "open")
    scheduler.add_request(StubRequest("large", prompt_tokens=GROUP_BLOCKS * 16))
    assert scheduler.requests == {}, "without word of serving only the null block's group is there"
