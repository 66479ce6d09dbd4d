"""The open loop in virtual time: the schedule waits for no answer, and latencies count from it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.clock import VirtualClock, run_virtual
from rose.load.driver import OpenLoop, Rejected, RequestFailed, RequestOutcome
from rose.load.load_report import LatencyBudget, measure
from rose.load.traces import made_trace

BUDGET = LatencyBudget()


class Scripted:
    """Answers request i after `delays_s[i]`: then its tokens, `gap_s` apart."""

    def __init__(self, delays_s, gap_s=0.1, errors=None):
        self.delays_s, self.gap_s, self.errors = delays_s, gap_s, errors or {}
        self.running = self.running_max = 0

    async def ask(self, record, now_s):
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await asyncio.sleep(self.delays_s[record.index])
            if record.index in self.errors:
                raise self.errors[record.index]
            for number in range(record.wanted_tokens):
                await asyncio.sleep(self.gap_s if number else 0)
                record.saw(1, now_s())
        finally:
            self.running -= 1


def trace_of(arrival_s, tokens=3):
    count = len(arrival_s)
    return made_trace("t", np.array(arrival_s, dtype=float), np.full(count, 10), np.full(count, tokens))


def sent(trace, exchange, stop_after_s=None, **known):
    clock = VirtualClock(start_s=1000.0)

    async def main():
        loop = OpenLoop(trace, exchange, clock, **known)
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, loop.stop)
        return await loop.run(), loop

    return run_virtual(main(), clock)


def test_the_schedule_does_not_wait_for_answers():
    records, _ = sent(trace_of([0, 1, 2, 3]), Scripted([10.0] * 4))
    assert [record.sent_s for record in records] == pytest.approx([0, 1, 2, 3])
    assert [record.ended_s for record in records] == pytest.approx([10.2, 11.2, 12.2, 13.2])
    assert [record.outcome for record in records] == [RequestOutcome.DONE] * 4


def test_first_token_and_gaps_are_measured_exactly():
    measures = measure(sent(trace_of([0, 5]), Scripted([0.4, 0.7], gap_s=0.2))[0], BUDGET)
    assert measures.ttft_s == pytest.approx([0.4, 0.7])
    assert measures.tpot_s == pytest.approx([0.2, 0.2])
    assert measures.gap_s == pytest.approx([0.2] * 4)


def test_the_wait_for_a_place_counts_as_latency():
    exchange = Scripted([2.0] * 3, gap_s=0.0)
    records, _ = sent(trace_of([0, 0.5, 1]), exchange, running_max=1)
    assert exchange.running_max == 1
    assert [record.was_held for record in records] == [False, True, True]
    assert [record.sent_s for record in records] == pytest.approx([0, 2, 4])
    assert measure(records, BUDGET).ttft_s == pytest.approx([2, 3.5, 5])


def test_a_time_out_counts_from_the_scheduled_arrival():
    records, _ = sent(trace_of([0, 0.5], tokens=1), Scripted([9.0, 0.6]), running_max=1, timeout_s=3.0)
    assert [record.outcome for record in records] == [RequestOutcome.TIMED_OUT] * 2
    assert [record.ended_s for record in records] == pytest.approx([3.0, 3.5])
    assert records[1].sent_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    "error, outcome",
    [(Rejected("429: full"), RequestOutcome.REJECTED), (RequestFailed("broke off"), RequestOutcome.FAILED)],
)
def test_an_error_ends_only_its_request(error, outcome):
    records, _ = sent(trace_of([0, 1]), Scripted([0.1, 0.1], errors={0: error}))
    assert [record.outcome for record in records] == [outcome, RequestOutcome.DONE]
    assert records[0].detail == str(error)


def test_an_unexpected_exception_ends_the_run():
    with pytest.raises(ExceptionGroup) as caught:
        sent(trace_of([0, 100]), Scripted([0.1, 0.1], errors={0: ZeroDivisionError()}))
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]


def test_stop_cuts_requests_under_way_and_sends_no_more():
    records, loop = sent(trace_of([0, 1, 2, 50]), Scripted([0.1, 20.0, 0.1, 0.1]), stop_after_s=10.0)
    assert [record.outcome for record in records] == [RequestOutcome.DONE, RequestOutcome.CUT, RequestOutcome.DONE]
    assert records[1].ended_s == pytest.approx(10.0)
    assert loop.was_stopped and loop.running == 0


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 30)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.one_of(st.none(), st.floats(0, 40)),
)
def test_every_request_that_is_sent_ends_once_and_in_time(rows, running_max, stop_after_s):
    trace = trace_of(sorted(at_s for at_s, _ in rows))
    exchange, ended = Scripted([delay_s for _, delay_s in rows]), []
    records, loop = sent(
        trace,
        exchange,
        stop_after_s,
        running_max=running_max,
        timeout_s=15.0,
        on_end=lambda record: ended.append(record.index),
    )
    assert sorted(ended) == [record.index for record in records] == list(range(len(records)))
    assert loop.was_stopped or len(records) == len(trace)
    assert exchange.running_max <= running_max and exchange.running == 0
    for record in records:
        assert record.outcome is not None
        assert not record.sent_s < record.scheduled_s - 1e-9
        assert record.scheduled_s - 1e-9 <= record.ended_s <= record.scheduled_s + 15.0 + 1e-9
        assert all(record.sent_s <= stamp <= record.ended_s for stamp in record.token_s)
