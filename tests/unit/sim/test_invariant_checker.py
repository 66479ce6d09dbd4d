"""The event log, and violations that the checker must find."""

from __future__ import annotations

from typing import Any

import pytest

from rose.api.requests import VersionSpan
from rose.api.trajectories import Batch, FinishedGroup
from rose.engines.base import Partial, Request, Sampling
from rose.sim.invariant_checker import EventLog, InvariantChecker, Violation
from rose.sim.scenario import SimulatedEpisode, random_scenario
from rose.sim.token_oracle import oracle_token


def test_equal_events_have_equal_digests():
    logs = [EventLog(lambda: 1.0) for _ in range(3)]
    for log, word in zip(logs, ("one", "one", "two"), strict=True):
        log.record("gateway", word)
    digests = [log.digest for log in logs]
    assert digests[0] == digests[1] != digests[2]


PROMPT = (9, 9, 9)
SEED = 3


def placed_checker() -> InvariantChecker:
    checker = InvariantChecker(random_scenario(1))
    checker.placed(Request("a", PROMPT, Sampling(max_tokens=3, seed=SEED)), attempt_id=1)
    return checker


def drawn(start: int, count: int, version: int = 0) -> tuple[tuple[int, ...], tuple[float, ...]]:
    token_ids, logprobs = zip(*(oracle_token(SEED, len(PROMPT) + start + index, version) for index in range(count)))
    return token_ids, logprobs


def test_tokens_of_the_reported_version_are_accepted_in_order() -> None:
    checker = placed_checker()
    checker.accepted(PROMPT, 0, *drawn(0, 2), "0", ends=False)
    checker.accepted(PROMPT, 2, *drawn(2, 1), "0", ends=True)
    assert checker.checked_tokens == 3


@pytest.mark.parametrize(
    ("start", "tokens", "version", "violation"),
    [
        (0, drawn(0, 2, version=1), "0", "is not what version 0 draws"),
        (0, drawn(1, 2), "0", "is not what version 0 draws"),
        (1, drawn(1, 1), "0", "were accepted where 0 are known"),
    ],
)
def test_other_tokens_are_violations(start: int, tokens: Any, version: str, violation: str) -> None:
    with pytest.raises(Violation, match=violation):
        placed_checker().accepted(PROMPT, start, *tokens, version, ends=False)


def test_durable_tokens_survive_the_gateway_and_others_do_not() -> None:
    checker, sampling = placed_checker(), Sampling(max_tokens=3, seed=SEED)
    checker.accepted(PROMPT, 0, *drawn(0, 1), "0", ends=False)
    checker.settled()
    checker.accepted(PROMPT, 1, *drawn(1, 1), "0", ends=False)
    checker.died()
    token_ids, logprobs = drawn(0, 1)
    partial = Partial(token_ids, logprobs, (VersionSpan("0", 0, 1),))
    checker.placed(Request("a", PROMPT, sampling, partial=partial), attempt_id=2)
    with pytest.raises(Violation, match="continues from 0 tokens, but 1 were received"):
        checker.placed(Request("a", PROMPT, sampling), attempt_id=3)
    with pytest.raises(Violation, match="comes after"):
        checker.placed(Request("a", PROMPT, sampling, partial=partial), attempt_id=1)


def test_a_batch_that_changes_is_a_violation() -> None:
    checker = placed_checker()
    for number, lost in ((1, 0), (2, 0), (1, 0)):
        checker.sent(Batch(number, (FinishedGroup("g", "", (), lost),)))
    with pytest.raises(Violation, match="differs when requested again"):
        checker.sent(Batch(1, (FinishedGroup("g", "", (), 1),)))


def test_a_world_that_leaves_work_undone_is_a_violation() -> None:
    checker = placed_checker()
    checker.check_all_done()
    checker.began(SimulatedEpisode("t", 1, 1, SEED, Sampling(max_tokens=3)), "g")
    with pytest.raises(Violation, match="t never ended"):
        checker.check_all_done()
