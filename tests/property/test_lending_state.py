"""Every series of commands and events leads to a lending state that the rules allow."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.core.lending_state import (
    OUTWARD,
    TRANSITIONS,
    ActualLending,
    DesiredLending,
    LendingState,
    Stop,
    StopCause,
    after_command,
    reconcile,
    with_stop,
)
from rose.device.engine_messages import AdminCommand
from rose.errors import RequestRefused

FAILURE = Stop(StopCause.FAILURE, "the rollout model was removed after a failure")
HELD_BACK = Stop(StopCause.HELD_BACK, "the engine died twice")
EVENTS = ("work", "no work", "failure", "held back")
RUNS = {LendingState.LENDING}
SHARES = st.one_of(st.none(), st.floats(0, 1))
STEPS = st.tuples(st.sampled_from([*TRANSITIONS, *EVENTS]), SHARES, SHARES)
ACTUAL = st.builds(ActualLending, st.sampled_from(OUTWARD), st.booleans(), st.booleans(), st.just(""))


def after(desired: DesiredLending, what: str, memory: float | None, compute: float | None) -> DesiredLending:
    if what in ("work", "no work"):
        return replace(desired, is_wanted=what == "work")
    if what == "failure":
        return with_stop(desired, FAILURE, "absent")
    if what == "held back":
        return with_stop(desired, HELD_BACK, "parked")
    try:
        return after_command(desired, what, memory, compute)
    except RequestRefused:
        assert desired.stop == FAILURE and what in ("resume", "dry_run")
        return desired


@given(st.lists(STEPS, max_size=30), ACTUAL)
def test_a_series_of_commands_keeps_the_rules(
    steps: list[tuple[str, float | None, float | None]], actual: ActualLending
) -> None:
    desired = DesiredLending()
    for what, memory, compute in steps:
        before, desired = desired, after(desired, what, memory, compute)
        result = reconcile(desired, actual)
        assert isinstance(result.state, LendingState)
        assert 0 <= desired.memory_share <= 1 and 0 <= desired.compute_share <= 1
        assert desired.resumes - before.resumes == (what == "resume" and before.stop != FAILURE)
        if before.stop == FAILURE:
            assert desired.stop == FAILURE, "a failure is final"
        if result.state in RUNS:
            assert result.stop is None and result.residency == actual.residency == "resident" and actual.has_engine
        if what in ("pause", "drain", "remove", "held back"):
            assert OUTWARD.index(desired.residency) >= OUTWARD.index(before.residency), "a stop calls nothing back"
            assert result.stop is not None and result.state not in (LendingState.LENDING, LendingState.DRY_RUN)


@given(st.lists(STEPS, max_size=20), ACTUAL)
def test_resume_undoes_everything_but_limits_and_failures(
    steps: list[tuple[str, float | None, float | None]], actual: ActualLending
) -> None:
    desired = DesiredLending()
    for step in steps:
        desired = after(desired, *step)
    resumed = after(desired, "resume", None, None)
    if desired.stop == FAILURE:
        assert reconcile(resumed, actual).state is LendingState.FAILED
        return
    fresh = DesiredLending(is_wanted=desired.is_wanted)
    limits = {"memory_share": desired.memory_share, "compute_share": desired.compute_share}
    assert resumed == replace(fresh, **limits, resumes=desired.resumes + 1)
    assert reconcile(resumed, actual).stop is None


@given(st.sampled_from(sorted(TRANSITIONS)), ACTUAL, st.booleans())
def test_a_command_that_is_repeated_changes_nothing_more(action: str, actual: ActualLending, is_wanted: bool) -> None:
    once = after_command(DesiredLending(is_wanted=is_wanted), action)
    twice = after_command(once, action)
    assert replace(twice, resumes=once.resumes) == once
    assert reconcile(twice, actual) == reconcile(once, actual)


@given(ACTUAL, st.sampled_from(sorted(set(TRANSITIONS) - {"status", "limits"})))
def test_a_failure_of_the_engine_is_shown_whatever_is_wanted(actual: ActualLending, action: str) -> None:
    desired = after_command(DesiredLending(), action)
    result = reconcile(desired, replace(actual, failure="gone for good"))
    assert (result.state, result.residency) == (LendingState.FAILED, "absent")
    assert result.stop is not None and (result.stop.cause, result.stop.text) == (StopCause.FAILURE, "gone for good")


PARKED = DesiredLending(is_wanted=False)


@pytest.mark.parametrize(
    "desired, actual, state, residency",
    [
        (DesiredLending(), ActualLending(), "lending", "resident"),
        (DesiredLending(is_dry_run=True), ActualLending(), "dry_run", "resident"),
        (DesiredLending(), ActualLending(has_engine=False), "activating", "resident"),
        (DesiredLending(), ActualLending("absent", is_loading=True), "activating", "resident"),
        (DesiredLending(), ActualLending("absent"), "drained", "resident"),
        (PARKED, ActualLending("parked"), "parked", "parked"),
        (after_command(DesiredLending(), "pause"), ActualLending("absent", is_loading=True), "paused", "resident"),
        (after_command(DesiredLending(), "drain"), ActualLending(), "drained", "parked"),
        (after_command(DesiredLending(), "remove"), ActualLending(), "drained", "absent"),
        (after_command(after_command(DesiredLending(), "remove"), "drain"), ActualLending(), "drained", "absent"),
        (after_command(after_command(DesiredLending(), "drain"), "pause"), ActualLending(), "paused", "parked"),
        (after_command(PARKED, "pause"), ActualLending("parked"), "paused", "parked"),
        (after_command(PARKED, "resume"), ActualLending("parked"), "parked", "parked"),
    ],
)
def test_what_follows_from_what_is_wanted_and_what_is(
    desired: DesiredLending, actual: ActualLending, state: str, residency: str
) -> None:
    result = reconcile(desired, actual)
    assert (result.state, result.residency) == (state, residency)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("name", ["memory_share", "compute_share"])
def test_a_limit_that_is_no_share_is_refused(name: str, share: float) -> None:
    with pytest.raises(RequestRefused, match="must be between 0 and 1"):
        after_command(DesiredLending(), "limits", **{name: share})


def test_every_command_of_the_wire_has_a_transition() -> None:
    assert set(get_args(get_type_hints(AdminCommand)["action"])) == set(TRANSITIONS)
