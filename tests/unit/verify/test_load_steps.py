"""What a replay says of users, and when the loss of attainment counts as one."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from rose.load.driver import Record, RequestOutcome
from rose.verify import load_steps
from rose.verify.kit_results import KitSettings
from rose.verify.replays import add_answered, add_served
from rose.verify.step_context import StepContext, StepFindings
from rose.vllm.control_segment import LendingAccount, Status

SETTINGS = KitSettings(ttft_ms=500.0, tpot_ms=150.0)


def record(index: int, ttft_s: float = 0.1, outcome: RequestOutcome = RequestOutcome.DONE, detail: str = "") -> Record:
    at_s = index / 10
    stamps = array("d", [at_s + ttft_s + 0.02 * token for token in range(5)])
    return Record(index, at_s, 20, 5, at_s, at_s + 1.0, stamps, outcome=outcome, detail=detail)


def context(tmp_path, earlier=None) -> StepContext:
    return StepContext(SETTINGS, tmp_path, None, earlier or {}, print)  # type: ignore[arg-type]


def alone(tmp_path, first: int, second: int, count: int) -> dict[str, object]:
    """What serving alone found: so many of `count` in budget in each run."""
    findings = StepFindings()
    counts = []
    for suffix, late in zip(load_steps.RUNS, (first, second)):
        records = [record(index, 0.1 if index < late else 0.9) for index in range(count)]
        counts.append(add_served(findings, records, SETTINGS, suffix))
    findings.figure("attainment, run 1 less run 2", 100 * (counts[0] - counts[1]) / count, "points", 2 * count)
    return {"serving-alone": findings.result("serving-alone", 1.0)}


def test_figures_of_a_replay_have_count_and_interval():
    findings = StepFindings()
    assert add_served(findings, [record(index) for index in range(1000)], SETTINGS) == 1000
    figures = {figure.name: figure for figure in findings.figures}
    attainment, tail = figures["attainment"], figures["TTFT P99"]
    assert (attainment.value, attainment.n) == (100.0, 1000) and attainment.low == pytest.approx(99.62, abs=0.01)
    assert tail.value == pytest.approx(100.0) and tail.n == 1000
    assert "TPOT P99" in figures and "gap between tokens P50" in figures


def test_under_a_thousand_requests_the_tail_is_p95():
    findings = StepFindings()
    add_served(findings, [record(index) for index in range(999)], SETTINGS)
    names = {figure.name for figure in findings.figures}
    assert "TTFT P95" in names and "TTFT P99" not in names


@pytest.mark.parametrize("outcome", [RequestOutcome.FAILED, RequestOutcome.TIMED_OUT, RequestOutcome.REJECTED])
def test_a_request_without_an_answer_fails_the_step_and_says_why(outcome):
    findings = StepFindings()
    add_answered(findings, [record(0), record(1, outcome=outcome, detail="503: no room")])
    [check] = findings.checks
    assert not check.is_ok and "1 of 2" in check.seen and "503: no room" in check.seen


def test_no_request_at_all_fails_the_step():
    findings = StepFindings()
    add_answered(findings, [])
    assert not findings.checks[0].is_ok


@pytest.mark.parametrize(
    "attained, count, is_ok",
    [(1000, 1000, True), (995, 1000, True), (950, 1000, False), (18, 20, True), (2, 20, False)],
)
def test_a_loss_counts_if_chance_and_spread_do_not_explain_it(tmp_path, attained, count, is_ok):
    made = context(tmp_path, alone(tmp_path, count, count, count))
    load_steps._compare_with_alone(made, attained, count)
    [check] = made.findings.checks
    assert check.is_ok is is_ok and "95 %" in check.seen


def test_the_spread_of_serving_alone_is_allowed(tmp_path):
    made = context(tmp_path, alone(tmp_path, 1000, 930, 1000))
    load_steps._compare_with_alone(made, 900, 1000)
    assert made.findings.checks[0].is_ok


def test_without_serving_alone_nothing_is_claimed(tmp_path):
    made = context(tmp_path)
    load_steps._compare_with_alone(made, 10, 10)
    assert made.findings.checks == [] and "Not compared" in made.findings.notes[0]


def test_what_rollouts_got_is_what_was_counted_meanwhile(tmp_path):
    before = Status(
        1,
        prompt_tokens=50,
        generated_tokens=50,
        lent=LendingAccount(steps=10, tokens=100, seconds=1.0, breaches={"step": 1}),
    )
    lent = LendingAccount(steps=30, tokens=500, seconds=6.0, breaches={"step": 2, "ttft": 3, "ambiguous": 1},
                          closed_s={"serving has work": 2.5})  # fmt: skip
    made = context(tmp_path)
    load_steps._add_lent(made, before, Status(1, prompt_tokens=300, generated_tokens=200, lent=lent), 10.0)
    values = {figure.name: figure.value for figure in made.findings.figures}
    assert values["rollout tokens per second"] == 40.0 and values["share of the time lent"] == 50.0
    assert values["budgets missed because of lending, by ROSE's own account"] == 3
    assert values["rollout steps longer than predicted"] == 1
    assert made.findings.facts == {"rollouts waited: serving has work": "25.0 % of the time"}
    assert made.findings.result("idle", 1.0).outcome == "passed"


def test_rollouts_that_never_ran_fail_the_step(tmp_path):
    made = context(tmp_path)
    load_steps._add_lent(made, Status(1), Status(1), 10.0)
    assert made.findings.result("idle", 1.0).reason == "rollouts ran: 0 steps"


def test_the_mps_step_says_what_a_fault_does(tmp_path):
    made = StepContext(KitSettings(device="cpu:0"), tmp_path, None, {}, print)  # type: ignore[arg-type]
    asyncio.run(load_steps.mps(made))
    assert made.findings.notes == [load_steps.MPS_FAULT] and "ends the serving engine too" in load_steps.MPS_FAULT


@pytest.mark.parametrize("with_ms, is_ok", [((10.0, 10.2), True), ((11.0, 11.1), False), ((10.0, 11.8), True)])
def test_serving_is_compared_with_vllm_without_roses_scheduler(tmp_path, with_ms, is_ok):
    findings = StepFindings()
    findings.figure("TTFT P50", 10.0, "ms", 100)
    made = context(tmp_path, {"plain": findings.result("plain", 1.0)})
    for suffix, value in zip(load_steps.RUNS, with_ms):
        made.findings.figure(f"TTFT P50{suffix}", value, "ms", 100)
    load_steps._compare_with_plain(made)
    assert [check.is_ok for check in made.findings.checks] == [is_ok]


def test_without_the_plain_step_nothing_is_compared(tmp_path):
    made = context(tmp_path)
    load_steps._compare_with_plain(made)
    assert made.findings.checks == []
