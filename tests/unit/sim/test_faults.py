"""Faults of a simulated world: each is injected alone, is healed, and breaks no invariant."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from rose.sim import faults
from rose.sim.faults import KINDS, FaultInjector
from rose.sim.scenario import random_scenario
from rose.sim.world import simulate

SEED = 5
LINES = {  # what the event log shows of each fault
    "kill_agent": "agent is killed", "kill_engine": "engine is killed", "lose_power": "loses its power",
    "stop_agent": "is stopped for", "stop_engine": "is stopped for", "cut_off": "network is cut", "jump_clock": "jumps",
    "reclaim_storm": "owner: |requests at once", "drain": "drains", "lag": "loads new weights slowly",
    "lie": "does not run", "close_relay": "is unreachable", "kill_gateway": "is killed",
    "stop_gateway": "is stopped for", "fill_disk": "cannot write to its disk", "storm": "loses ",
}  # fmt: skip


def end_of_faults(lines: list[str]) -> int:
    return next(number for number, line in enumerate(lines) if "has no more faults" in line)


def test_every_kind_of_fault_is_covered() -> None:
    assert {kind.__name__ for kind in KINDS} - set(LINES) == {"slow_down"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_fault_is_healed_and_breaks_nothing(
    kind: Callable[[FaultInjector], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "KINDS", {kind: 1})
    lines: list[str] = []
    scenario = dataclasses.replace(
        random_scenario(SEED, minutes=0.1), faults_per_s=1.0, dedicated=1, borrowed=1, pages=120
    )
    report = simulate(scenario, listen=lines.append)
    assert report.is_fine, report.violation
    end = end_of_faults(lines)
    assert any(re.search(LINES.get(kind.__name__, ""), line) for line in lines[:end])


def test_without_faults_nothing_is_injected() -> None:
    lines: list[str] = []
    scenario = dataclasses.replace(random_scenario(SEED, minutes=0.05), faults_per_s=0.0)
    report = simulate(scenario, listen=lines.append)
    assert report.is_fine and report.counts["restarts"] == report.counts["lost"] == 0
    assert not any(
        word in line for line in lines[: end_of_faults(lines)] for word in ("killed", "stopped", "is cut", "loses")
    )
