"""The users of a run: each request is one record, and the log has the running attainment."""

from __future__ import annotations

import io

import msgspec
import pytest

from rose.load.driver import Record, RequestOutcome
from rose.load.load_report import LatencyBudget
from rose.run.serving_traffic import RequestWriter, ServingLog, UserRequest, served_of


def test_a_request_is_recorded_with_its_latencies():
    record = Record(3, scheduled_s=10.0, prompt_tokens=50, wanted_tokens=3, sent_s=10.001, ended_s=10.3)
    for moment_s in (10.1, 10.2, 10.3):
        record.saw(1, moment_s)
    record.outcome = RequestOutcome.DONE
    served = served_of(record, LatencyBudget(), began_s=1000.0)
    assert (served.at_s, served.outcome, served.attained, served.output_tokens) == (1010.0, "done", True, 3)
    assert served.ttft_ms == pytest.approx(100) and served.tpot_ms == pytest.approx(100)
    assert served.late_ms == pytest.approx(1)


def test_the_running_attainment_leaves_out_cut_requests():
    written: list[bytes] = []
    log = ServingLog(written.append)
    assert log.attainment() is None
    for outcome, attained in (("done", True), ("timed_out", False), ("cut", False)):
        log.add(msgspec.json.encode(UserRequest(1.0, outcome, 1.0, 1.0, attained, 1, 1, 0.0)))
    assert log.attainment() == 0.5 and log.requests == len(written) == 2


def test_a_request_without_tokens_has_no_latencies():
    record = Record(3, scheduled_s=10.0, prompt_tokens=50, wanted_tokens=3, sent_s=10.0, ended_s=10.1)
    record.outcome = RequestOutcome.REJECTED
    request = served_of(record, LatencyBudget(), began_s=0.0)
    assert (request.ttft_ms, request.tpot_ms, request.attained, request.outcome) == (None, None, False, "rejected")


def test_each_request_that_ends_is_one_line():
    stream = io.StringIO()
    writer = RequestWriter(LatencyBudget(), stream)
    for index in range(2):
        record = Record(index, scheduled_s=0.0, prompt_tokens=5, wanted_tokens=1, sent_s=0.0, ended_s=0.1)
        record.outcome = RequestOutcome.FAILED
        writer.add(record)
    rows = [msgspec.json.decode(line, type=UserRequest) for line in stream.getvalue().splitlines()]
    assert [row.outcome for row in rows] == ["failed", "failed"]
