"""How quickly a device is, by its own steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.unit.rollout_world import LENDING

from rose.api.worker_messages import Heartbeat, decode_to_gateway, encode
from rose.core.stalls import BLOCKED_AFTER_S, ObservedStall
from rose.engines.base import EngineFacts, Stepped, TokenEvent
from rose.worker.heartbeats import GAP_STEPS_MAX, STATUS_S_MAX, HeartbeatBuilder, LentShare, Rates

FACTS = EngineFacts("0", 1, 0, 100, 10, 0, 16, 1, 4096)


def decode(sequences: int, seconds: float) -> Stepped:
    events = tuple(TokenEvent(str(n), (1,), (0.0,), "0") for n in range(sequences))
    return Stepped(events, FACTS, sequences, seconds)


def prompt(tokens: int, seconds: float) -> Stepped:
    return Stepped((), FACTS, tokens, seconds)


def test_no_rate_is_reported_before_a_few_steps() -> None:
    rates = Rates()
    rates.observe(decode(4, 0.1), 0.1)
    rates.observe(prompt(100, 0.1), 0.2)
    assert (rates.prefill_tok_s, rates.decode_tok_s) == (None, None)


def test_prompts_and_answers_are_timed_apart() -> None:
    rates = Rates()
    for number in range(20):
        rates.observe(prompt(400, 0.1), number * 1.0)
        rates.observe(decode(8, 0.02), number * 1.0 + 0.02)
    assert rates.prefill_tok_s == pytest.approx(4000) and rates.decode_tok_s == pytest.approx(50)


def test_time_between_two_steps_counts_as_waiting() -> None:
    rates = Rates()
    for number in range(20):
        rates.observe(decode(8, 0.02), number * 0.05)
    assert rates.decode_tok_s == pytest.approx(20, rel=0.1)


def test_a_long_wait_does_not_make_a_device_slow_for_ever() -> None:
    rates = Rates()
    for number in range(100):
        rates.observe(decode(8, 0.02), number * 60.0)
    assert rates.decode_tok_s is not None and rates.decode_tok_s >= 1 / (GAP_STEPS_MAX * 0.02)


@pytest.mark.parametrize("at_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_and_a_process_that_slept_count_for_little(at_s: float) -> None:
    rates = Rates()
    for number in range(100):
        rates.observe(decode(1, 0.1), number * 0.1)
    rates.observe(decode(1, 0.1), at_s)
    assert rates.decode_tok_s == pytest.approx(10, rel=0.15)


def test_steps_without_a_duration_are_skipped() -> None:
    rates = Rates()
    for number in range(10):
        rates.observe(decode(1, 0.0), float(number))
    assert rates.decode_tok_s is None


def beat(shut_s: float | None, *, heard_s: float | None, now_s: float, steps: int = 0) -> Heartbeat:
    facts = SimpleNamespace(
        generated_tokens=0, running=1, waiting=0, kv_blocks_used=0, kv_blocks_limit=1, block_tokens=16, version="0",
        steps=0,
    )  # fmt: skip
    engine = SimpleNamespace(facts=facts, lending_status=msgspec.structs.replace(LENDING, shut_s=shut_s), trouble=None)
    condition = HeartbeatBuilder(cast(Any, engine), Rates(), lambda: "", 0.0)
    if heard_s is not None:
        condition.on_lending_status(heard_s)
    facts.steps += steps
    return condition.build(now_s)


@pytest.mark.parametrize(
    "told, shut_s",
    [
        pytest.param(beat(None, heard_s=1.0, now_s=1.5), None, id="open"),
        pytest.param(beat(0.5, heard_s=1.0, now_s=1.75), 1.25, id="and time has passed since"),
        pytest.param(beat(0.5, heard_s=1.0, now_s=0.0), 0.5, id="by a clock that went back"),
        pytest.param(beat(0.5, heard_s=1.0, now_s=1.75, steps=1), None, id="and a step was made since"),
        pytest.param(beat(0.5, heard_s=1.0, now_s=1.5 + STATUS_S_MAX), None, id="and was not heard of since"),
        pytest.param(beat(0.5, heard_s=None, now_s=99.0), 0.5, id="by an engine that is looked at just now"),
    ],
)
def test_a_heartbeat_carries_the_length_of_the_stall(told: Heartbeat, shut_s: float | None) -> None:
    assert told.gate_open, "it takes turns"
    assert told.shut_s == shut_s
    assert decode_to_gateway(encode([told])) == [told]


def test_an_older_agent_reports_no_stall() -> None:
    said = {"type": "Beat", "running": 0, "waiting": 0, "kv_used_tokens": 0, "kv_tokens": 1, "version": "0"}
    [heard] = decode_to_gateway(msgspec.msgpack.encode([said | {"gate_open": True}]))
    assert isinstance(heard, Heartbeat) and heard.shut_s is None


def test_heartbeats_resolve_stalls_as_finely_as_the_device() -> None:
    """Two words apart by less than what makes a gate shut are about the same time of being shut."""
    seen = ObservedStall()
    seen.on_heartbeat(BLOCKED_AFTER_S, 1.0)
    seen.on_heartbeat(BLOCKED_AFTER_S, 1.0 + BLOCKED_AFTER_S)
    assert seen.opened_s == 0.0
    seen.on_heartbeat(BLOCKED_AFTER_S, 1.01 + 2 * BLOCKED_AFTER_S)
    assert seen.opened_s == pytest.approx(1.01 + BLOCKED_AFTER_S)


def test_the_lent_share_is_smoothed_and_survives_a_counter_that_begins_anew() -> None:
    lent = LentShare()
    lent.observe(0.0, 0.0)
    assert lent.share is None
    lent.observe(0.5, 1.0)
    assert lent.share == 0.5
    lent.observe(0.5, 6.0)
    assert lent.share == 0.0  # nothing for as long as it is smoothed over
    lent.observe(0.1, 7.0)  # another engine
    lent.observe(0.1, 7.01)  # too soon for a rate
    assert lent.share == 0.0
    lent.observe(2.0, 8.0)
    assert lent.share is not None and 0.0 < lent.share <= 1.0
