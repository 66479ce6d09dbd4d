"""Counters of lending go on over restarts of the rollout engine and of the serving engine."""

from __future__ import annotations

from typing import Any

from rose.vllm.control_segment import LendingAccount, Status
from rose.vllm.lending_counters import LendingCounters


def test_counters_go_on_when_an_engine_or_its_terms_end() -> None:
    tally = LendingCounters()

    def told(process_id: int, evictions: int, **lent: Any) -> tuple[Any, ...]:
        found = tally.total(Status(process_id, evictions=evictions, lent=LendingAccount(**lent)))
        return found.evictions, found.lent.steps, found.lent.seconds, found.lent.breaches, found.lent.missing

    assert told(7, 5, steps=3, seconds=0.25, breaches={"ttft": 2}) == (5, 3, 0.25, {"ttft": 2}, "")
    assert told(7, 6, missing="64 steps") == (6, 3, 0.25, {"ttft": 2}, "64 steps"), "new terms"
    assert told(7, 6, steps=1, seconds=0.5, breaches={"step": 1}) == (6, 4, 0.75, {"ttft": 2, "step": 1}, "")
    assert told(0, 0) == (6, 4, 0.75, {"ttft": 2, "step": 1}, ""), "no engine"
    assert told(8, 1, steps=9) == (7, 13, 0.75, {"ttft": 2, "step": 1}, ""), "another one"
