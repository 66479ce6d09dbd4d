"""A request inside a step engine: its place in the queue and what it has produced."""

from __future__ import annotations

import pytest

from rose.api.requests import VersionSpan
from rose.engines.base import Partial, Request
from rose.engines.live_request import PRIORITY_LEVELS, PRIORITY_PLACES, PRIORITY_TURNS, LiveRequest


def live(order: int, priority: int = 0, **fields: object) -> LiveRequest:
    request = Request(f"r{order}", (1, 2, 3), priority=priority)
    return LiveRequest(request, order, [1, 2, 3], [], [], **fields)


def test_equal_requests_run_in_the_order_of_their_arrival():
    assert live(1).key < live(2).key


def test_a_level_of_priority_is_worth_a_bounded_number_of_places():
    assert live(PRIORITY_PLACES - 1, priority=-1).key < live(0).key < live(PRIORITY_PLACES + 1, priority=-1).key


@pytest.mark.parametrize("priority", [-(10**9), 10**9])
def test_no_priority_is_worth_more_than_the_last_level(priority):
    assert abs(live(0, priority).key[0]) == PRIORITY_LEVELS * PRIORITY_PLACES
    assert abs(live(0, priority).turn[0]) == PRIORITY_TURNS


def test_of_running_requests_the_one_served_longest_ago_goes_first():
    assert live(2, last_planned=3).turn < live(1, last_planned=4).turn
    assert live(2, priority=-1, last_planned=4).turn == (3, 2)


def test_a_partial_result_has_what_follows_the_prompt():
    request = live(0)
    request.token_ids += [7, 9]
    request.logprobs += [-0.5, -0.25]
    request.spans.append(VersionSpan("1", 0, 2))
    assert request.produced == 2
    assert request.partial() == Partial((7, 9), (-0.5, -0.25), (VersionSpan("1", 0, 2),))
