"""How quickly a device is, by its own steps."""

from __future__ import annotations

import pytest

from rose.coserve.messages import Stepped
from rose.engines.base import EngineFacts, TokenEvent
from rose.rollout.rates import GAP_STEPS_MAX, Rates

FACTS = EngineFacts("0", 1, 0, 100, 10, 0, 16, 1, 4096)


def decode(sequences: int, seconds: float) -> Stepped:
    events = tuple(TokenEvent(str(n), (1,), (0.0,), "0") for n in range(sequences))
    return Stepped(events, FACTS, sequences, seconds)


def prompt(tokens: int, seconds: float) -> Stepped:
    return Stepped((), FACTS, tokens, seconds)


def test_nothing_is_said_before_there_are_a_few_steps() -> None:
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


def test_what_lies_between_two_steps_is_time_that_a_turn_waits() -> None:
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


def test_steps_that_do_not_say_how_long_they_took_are_skipped() -> None:
    rates = Rates()
    for number in range(10):
        rates.observe(decode(1, 0.0), float(number))
    assert rates.decode_tok_s is None
