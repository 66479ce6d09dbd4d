"""What the gate grants, what a cut leads to, and the shapes of steps and of waiting work."""

from __future__ import annotations

import select
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.sglang_stubs import StubBatch, StubReq

from rose.core.facts import RolloutView, StepFeatures
from rose.sglang.parked_sleep import ParkedSleep
from rose.sglang.rollout_gate import CUT_HOLD_S, GateSizes, RolloutGate, kv_token_bytes, step_features, view_of
from rose.vllm.control_segment import EngineControl, Segment, open_control, open_status

WANTED = RolloutView(2, 10, 5)
SIZES = GateSizes(step_tokens=64, sequences=8, kv_tokens=1000, token_bytes=8, max_context_tokens=128)


@pytest.fixture
def control(tmp_path: Path) -> Segment[EngineControl]:
    return open_control(tmp_path, create=True)


@pytest.fixture
def gate(tmp_path: Path, control: Segment[EngineControl]) -> RolloutGate:
    return RolloutGate(tmp_path, SIZES, ParkedSleep(select.poll(), []), lambda: "v1")


def test_the_gate_is_open_within_the_agents_grant_only(gate: RolloutGate, control: Segment[EngineControl]) -> None:
    gate.ask(WANTED, 10.0)
    assert not gate.is_open
    control.write(EngineControl(tokens=100, sequences=5, until_s=1e9))
    gate.ask(WANTED, 10.0)
    assert (gate.is_open, gate.tokens, gate.sequences) == (True, 64, 5)
    gate.ask(WANTED, 2e9)
    assert not gate.is_open


def test_an_engine_without_kv_memory_runs_nothing(gate: RolloutGate, control: Segment[EngineControl]) -> None:
    control.write(EngineControl(tokens=100, sequences=5, until_s=1e9, kv_bytes=0))
    gate.ask(WANTED, 10.0)
    assert gate.is_unloaded and not gate.is_open


def test_a_cut_holds_back_new_requests_for_a_while(gate: RolloutGate, control: Segment[EngineControl]) -> None:
    control.write(EngineControl(tokens=100, sequences=3, until_s=1e9))
    gate.ask(WANTED, 10.0)
    assert gate.sequences_to_keep(2, 10.0) == 2
    assert gate.sequences_to_begin(1, 10.0) == 2
    assert gate.sequences_to_keep(6, 10.0) == 3
    control.write(EngineControl(tokens=100, sequences=100, until_s=1e9))
    gate.ask(WANTED, 10.1)
    assert gate.sequences_to_begin(3, 10.1) == 0
    assert gate.sequences_to_begin(3, 10.0 + CUT_HOLD_S) == 5


def test_the_status_has_what_the_agent_reads(gate: RolloutGate, tmp_path: Path) -> None:
    gate.counts["steps"], gate.live = 3, {"a": (1, 2)}
    gate.publish("running", 1, 2, 30, 40)
    status = open_status(tmp_path).read()[1]
    assert status is not None
    assert (status.version, status.running, status.waiting, status.steps, status.live) == ("v1", 1, 2, 3, {"a": (1, 2)})
    assert (status.kv_blocks_limit, status.kv_blocks_used, status.kv_blocks_cached) == (1000, 30, 40)
    assert (status.block_tokens, status.block_bytes, status.max_context_tokens) == (1, 8, 128)


def request(prompt: int, answer: int = 0, begin: int = 0, end: int = 0) -> StubReq:
    made = StubReq("a", prompt)
    made.output_ids, made.prefix_len, made.extend_end = [0] * answer, begin, end
    return made


def test_shapes_of_steps() -> None:
    prefill = StubBatch([request(10, begin=4, end=10)], is_extend=True)
    assert step_features(prefill) == StepFeatures(6, 10, 6 * 4 + 6 * 7 // 2, 1)
    decode = StubBatch([request(10, 1), request(5, 3)])
    assert step_features(decode) == StepFeatures(2, 11 + 8, 10 + 7 + 2, 2)


def test_work_that_waits_is_counted_in_tokens() -> None:
    partly = request(100, begin=40)
    view = view_of([request(10, 2), request(20, 4), partly], partly, [request(7), request(5, 3)])
    assert view == RolloutView(2, 60 + 7 + 8, 40)
    assert view_of([request(10, 2), request(20, 4)], None, []) == RolloutView(2, 0, (11 + 23) // 2)
    assert view_of([], None, []) == RolloutView()


def test_kv_bytes_of_a_token_come_from_the_pool() -> None:
    pool = SimpleNamespace(get_kv_size_bytes=lambda: (4000, 4000))
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), max_total_num_tokens=1000
    )
    assert kv_token_bytes(scheduler) == 8
