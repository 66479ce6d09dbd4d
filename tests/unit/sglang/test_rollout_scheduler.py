"""A rollout engine on SGLang steps within the agent's grant, and ends requests without a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit import sglang_stubs
from tests.unit.sglang_stubs import StubReq

from rose.errors import ConfigError
from rose.sglang.rollout_gate import CUT_HOLD_S
from rose.vllm.control_segment import ENGINE_FOLDER_VARIABLE, EngineControl, Segment, Status, open_control, open_status

LONG_S = 1e9


class Engine:
    """A rollout scheduler in the loop of SGLang's engine, and the agent's side of its segments."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ENGINE_FOLDER_VARIABLE, str(folder))
        self.modules = sglang_stubs.install(monkeypatch)
        self.control: Segment[EngineControl] = open_control(folder, create=True)
        self.kind = self.modules.rollout_scheduler.SglangRolloutScheduler
        self.scheduler = self.kind()
        self.slept_s: list[float] = []
        self.scheduler._gate._sleep.sleep = self.slept_s.append
        self._status = open_status(folder)

    def grant(self, **changes: Any) -> None:
        plain: dict[str, Any] = {"tokens": 1 << 20, "sequences": 1 << 20, "until_s": LONG_S}
        self.control.write(EngineControl(**{**plain, **changes}))

    def add(self, rid: str, **sizes: Any) -> StubReq:
        request = StubReq(rid, **sizes)
        self.scheduler._add_request_to_queue(request)
        return request

    def turn(self) -> Any:
        """Go round SGLang's loop once and return the batch that ran."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(scheduler.running_batch, scheduler.last_batch)
        scheduler.running_batch, scheduler.last_batch = plan.running_batch, plan.batch_to_run
        if plan.batch_to_run:
            scheduler.process_batch_result(plan.batch_to_run, None)
        return plan.batch_to_run

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
    with pytest.raises(ConfigError, match="works for an agent"):
        engine.kind()


@pytest.mark.parametrize("options, words", [({"is_overlapping": True}, "overlap"), ({"chunk": None}, "never start")])
def test_an_engine_with_the_wrong_options_is_refused(engine: Engine, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine.kind(**options)


def test_an_engine_of_several_devices_is_refused(engine: Engine) -> None:
    engine.modules.parallel.tp_size = 2
    with pytest.raises(ConfigError, match="one device"):
        engine.kind()


def test_no_turn_is_taken_that_sglang_would_cut_short(engine: Engine) -> None:
    assert engine.status.max_context_tokens == engine.scheduler.max_req_len - 1


def test_nothing_runs_without_a_grant_and_the_engine_sleeps(engine: Engine) -> None:
    engine.add("a")
    assert engine.turn() is None
    assert engine.slept_s and (engine.status.state, engine.status.waiting, engine.status.steps) == ("parked", 1, 0)
    engine.grant()
    assert engine.turn().reqs[0].rid == "a"


def test_a_prefill_that_ended_before_the_gate_closed_is_not_lost(engine: Engine) -> None:
    engine.grant()
    request = engine.add("a")
    engine.turn()
    engine.grant(tokens=0)
    assert engine.turn() is None
    assert [one.rid for one in engine.scheduler.running_batch.reqs] == ["a"]
    engine.grant()
    while not request.finished():
        engine.turn()
    assert (engine.status.steps, engine.status.generated_tokens, engine.status.prompt_tokens) == (4, 4, 8)


def test_a_prompt_is_cut_to_the_granted_tokens(engine: Engine) -> None:
    engine.grant(tokens=3)
    engine.add("a", prompt_tokens=8)
    for _ in range(3):
        engine.turn()
    assert engine.scheduler.chunks == [3, 3, 3]
    assert (engine.scheduler.chunked_prefill_size, engine.scheduler.max_prefill_tokens) == (16, 16)
    assert engine.status.prompt_tokens == 8


def test_running_requests_beyond_the_grant_wait_with_their_tokens(engine: Engine) -> None:
    engine.grant()
    requests = [engine.add(name, max_tokens=9) for name in "abc"]
    for _ in range(4):
        engine.turn()
    engine.grant(sequences=1)
    assert [one.rid for one in engine.turn().reqs] == ["a"]
    assert [one.rid for one in engine.scheduler.waiting_queue] == ["b", "c"]
    assert all(one.output_ids for one in requests) and engine.status.preemptions == 2
    engine.grant()
    assert [one.rid for one in engine.turn().reqs] == ["a"], "for a moment after a cut no request is begun again"
    engine.scheduler._gate._cut_s = -CUT_HOLD_S
    assert [one.rid for one in engine.turn().reqs] == ["b"]


def test_an_abort_behind_a_closed_gate_ends_a_running_request(engine: Engine) -> None:
    engine.grant()
    engine.add("rose-1")
    engine.add("rose-2")
    for _ in range(3):
        engine.turn()
    engine.grant(tokens=0)
    engine.scheduler.abort_request(SimpleNamespace(rid="rose-1", abort_all=False))
    assert engine.scheduler.aborted == ["rose-1"]
    engine.turn()
    assert (engine.status.running, engine.status.waiting, engine.status.evictions) == (1, 0, 1)
    assert engine.status.preemptions == 0


def test_an_unloaded_engine_ends_every_request(engine: Engine) -> None:
    engine.grant()
    engine.add("a")
    engine.turn()
    engine.add("b")
    engine.grant(kv_bytes=0)
    assert engine.turn() is None
    assert sorted(engine.scheduler.aborted) == ["a", "b"]
    assert (engine.status.kv_blocks_limit, engine.status.done) == (0, engine.control.number)


def test_prefixes_of_old_weights_are_not_found_under_new_ones(engine: Engine) -> None:
    old, waiting = engine.add("a", tenant="x"), engine.add("b")
    key = old.extra_key
    engine.scheduler.waiting_queue.remove(old)
    engine.scheduler.record_weight_version_change("default")  # the same name for other weights
    assert old.extra_key == key, "it has computed something under the old weights"
    assert waiting.extra_key not in (None, "0:default:")
    assert engine.add("c", tenant="x").extra_key != key
    assert engine.add("d", tenant="x").extra_key != engine.add("e", tenant="y").extra_key


def test_a_paused_engine_sleeps_and_takes_controls(engine: Engine) -> None:
    engine.grant()
    engine.scheduler._engine_paused = True
    assert engine.scheduler.ingest_requests() == "received"
    assert engine.slept_s and engine.status.done == engine.control.number
