"""What counts of a run that was killed and resumed: each step once, by its last word."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.launch_lines import costs_of, counted, html_report, of_kind, run_lines, step, summary_of

from rose.cost.bill import CostSettings

Line = dict[str, Any]


def steps(*numbers: int, **changes: Any) -> list[Line]:
    return [step(number, 10.0 * number, **changes) for number in numbers]


def resume(at: int) -> Line:
    return {"kind": "resume", "step": at}


def mark(when: str, gateway_s: float, turns: int) -> Line:
    return {"kind": "costs", "when": when, "at_s": 0.0, "turns": turns, "roles": {"gateway": gateway_s}}


@pytest.mark.parametrize(
    "story, lines, expected",
    [
        ("never killed", steps(1, 2, 3), [1, 2, 3]),
        ("killed in step 4", [*steps(1, 2, 3), resume(2), *steps(3, 4)], [1, 2, 3, 4]),
        ("nothing was lost", [*steps(1, 2), resume(2), *steps(3)], [1, 2, 3]),
        ("from the start", [*steps(1, 2), resume(0), *steps(1)], [1]),
        ("twice", [*steps(1, 2, 3), resume(2), *steps(3), resume(2), *steps(3, 4)], [1, 2, 3, 4]),
        ("further back", [*steps(1, 2, 3), resume(3), *steps(4), resume(1), *steps(2)], [1, 2]),
        ("killed again at once", [*steps(1, 2, 3), resume(2), resume(2)], [1, 2]),
    ],
)
def test_each_step_counts_once(story, lines, expected):
    assert [line["step"] for line in of_kind(counted(lines), "step")] == expected


def test_the_last_word_holds():
    lines = [*steps(1, 2, turns=100), resume(1), *steps(2, turns=7)]
    assert [line["turns"] for line in of_kind(counted(lines), "step")] == [100, 7]
    evaluations = [{"kind": "evaluation", "step": 0, "success_rate": rate} for rate in (0.1, 0.2)]
    found = of_kind(counted([evaluations[0], resume(0), evaluations[1]]), "evaluation")
    assert [line["success_rate"] for line in found] == [0.2]


def test_what_was_said_at_an_end_that_was_none_counts_no_more():
    lines = [*steps(1), {"kind": "weights", "hash": "a"}, {"kind": "finished", "step": 1}, resume(1), *steps(2)]
    lines += [{"kind": "ended", "how": "interrupted"}, resume(2)]
    assert [line["kind"] for line in counted(lines)] == ["step", "resume", "step", "resume"]


def test_the_balance_is_that_of_the_last_step_that_counts():
    lines = [{"kind": "balance", "step": number, "begun": 8 * number} for number in (1, 2, 3)]
    assert of_kind(counted([*lines, resume(2)]), "balance")[-1]["begun"] == 16


def test_turns_go_on_from_what_the_attempt_before_had():
    def sample(dedicated: int) -> Line:
        return {"kind": "sample", "at_s": 0.0, "turns": {"dedicated": dedicated}, "running": {}}

    lines = [sample(5), sample(9), resume(0), sample(0), sample(4), resume(0), sample(1)]
    assert [line["turns"]["dedicated"] for line in of_kind(counted(lines), "sample")] == [5, 9, 9, 13, 14]


def test_breaches_of_every_attempt_count():
    def lending(ttft: int) -> Line:
        return {"kind": "lending", "breaches": {"step": 1, "ttft": ttft, "tpot": 0}}

    lines = [*steps(1), lending(20), *steps(2), lending(30), resume(1), *steps(2), lending(2), resume(2)]
    found = summary_of(counted(lines), [], CostSettings(breach_usd=1.0))
    assert found["cost"]["bill"]["slo_risk"] == 32.0
    assert found["notes"] == ["32 requests of users came late, or may have, because the device was lent"]


def test_what_every_attempt_lent_counts():
    def lent(tokens: int) -> Line:
        return {"kind": "lent", "lender": "borrowed", "counts": {"tokens": tokens}}

    lines = [*steps(1), lent(500), *steps(2), resume(1), *steps(2), lent(40)]
    assert [line["counts"]["tokens"] for line in of_kind(counted(lines), "lent")] == [500, 540]


def test_processor_time_of_which_the_end_is_not_known_is_left_out():
    lines = [mark("begin", 1.0, 10), mark("pause", 3.0, 20), mark("resume", 4.0, 20)]
    lines += [resume(0), mark("begin", 0.5, 0), mark("end", 1.5, 30)]
    found = costs_of(of_kind(counted(lines), "costs"))
    assert found["cpu_s_by_role"] == {"gateway": 3.0} and found["control_cpu_ms_per_turn"] == 75.0


def test_figures_and_report_are_those_of_a_run_that_was_never_killed():
    whole = run_lines(8)
    at = next(place for place, line in enumerate(whole) if line["kind"] == "step" and line["step"] == 4)
    killed = [*whole[: at + 1], resume(3), *whole[at:]]
    expected, found = summary_of(whole, []), summary_of(counted(killed), [])
    assert found["resumes"] == 1 and expected["resumes"] == 0
    unknown = ("resumes", "cpu_s_by_role", "control_cpu_ms_per_turn")  # the first mark was never closed
    assert {key: found[key] for key in found if key not in unknown} == {
        key: expected[key] for key in expected if key not in unknown
    }
    assert "<svg" in html_report({"name": "it", **found}, counted(killed), [], "")
