"""A step passes if it returned and every check held; whatever it found before it failed is kept."""

from __future__ import annotations

from rose.bounds import TEXT_CHARACTERS_MAX
from rose.errors import Unavailable
from rose.verify.kit_results import ENTRIES_MAX, StepResult
from rose.verify.step_context import NotApplicable, StepContext, StepFindings


def found() -> StepFindings:
    findings = StepFindings()
    findings.check("one", True)
    findings.figure("TTFT", 1.5, "ms", 10, (1.0, 2.0))
    findings.fact("GPU", "one")
    findings.note("a note")
    return findings


def test_a_step_whose_checks_hold_has_passed():
    result = found().result("idle", 1.23456)
    assert (result.outcome, result.reason, result.seconds) == ("passed", "", 1.235)
    assert (result.figures[0].n, result.figures[0].low, result.facts, result.notes) == (
        10,
        1.0,
        {"GPU": "one"},
        ("a note",),
    )


def test_a_step_with_a_failed_check_has_failed_and_says_which():
    findings = found()
    findings.check("two", False, "7 of 10")
    findings.check("three", False)
    assert findings.result("idle", 1.0).reason == "two: 7 of 10; three"


def test_an_error_makes_a_failed_step_that_keeps_what_was_found():
    result = found().result("idle", 1.0, Unavailable("the engine is gone", hint="look"))
    assert (result.outcome, result.reason, len(result.figures)) == ("failed", "the engine is gone", 1)
    assert found().result("idle", 1.0, ValueError("x")).reason == "ValueError: x"


def test_a_step_that_cannot_say_anything_here_was_not_run():
    result = found().result("idle", 1.0, NotApplicable("the model is too large"))
    assert (result.outcome, result.reason) == ("not run", "the model is too large")


def test_long_texts_and_many_entries_fit_into_a_result():
    findings = StepFindings()
    for number in range(2 * ENTRIES_MAX):
        findings.check(f"{number}" * 300, True, "x" * 10_000)
    result = findings.result("idle", 1.0, Unavailable("y" * 100_000))
    assert len(result.checks) == ENTRIES_MAX and len(result.checks[0].seen) <= TEXT_CHARACTERS_MAX
    assert len(result.reason) <= TEXT_CHARACTERS_MAX and "[...]" in result.reason


def test_figures_of_earlier_steps_are_found(tmp_path):
    earlier = {"serving-alone": found().result("serving-alone", 1.0), "idle": StepResult("idle", "not run", "no GPU")}
    context = StepContext(None, tmp_path, None, earlier, print)  # type: ignore[arg-type]
    assert context.earlier("serving-alone", "TTFT").value == 1.5
    assert context.earlier("idle", "TTFT") is None and context.earlier("decode", "TTFT") is None
