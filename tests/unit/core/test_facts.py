"""Views of a device, and the grant that they lead to."""

from __future__ import annotations

import math

import pytest

from rose.core.facts import Grant, RunningRequest, ServingView, WaitingRequest


@pytest.mark.parametrize(
    "grant, now_s, is_open",
    [
        (Grant(8, 1, 5.0), 4.9, True),
        (Grant(8, 1, 5.0), 5.0, False),
        (Grant(0, 1, 5.0), 0.0, False),
        (Grant(8, 0, 5.0), 0.0, False),
        (Grant(8, 1, math.inf), 1e9, True),
    ],
)
def test_a_grant_is_open_until_it_expires_and_only_with_tokens_and_sequences(
    grant: Grant, now_s: float, is_open: bool
) -> None:
    assert grant.is_open(now_s) is is_open


def test_serving_is_idle_only_without_any_request() -> None:
    assert ServingView(1).is_idle
    assert not ServingView(1, (WaitingRequest(1.0, 10),)).is_idle
    assert not ServingView(1, (), (RunningRequest(1.0, 10),)).is_idle


def test_the_oldest_arrival_is_that_of_all_requests() -> None:
    assert ServingView(1).oldest_arrival_s == math.inf
    waiting = (WaitingRequest(3.0, 10), WaitingRequest(2.0, 10))
    assert ServingView(1, waiting).oldest_arrival_s == 2.0
    assert ServingView(1, waiting, (RunningRequest(9.0, 10, arrival_s=1.0),)).oldest_arrival_s == 1.0
