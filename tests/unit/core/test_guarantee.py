"""docs/guarantee.md names a test for every step of its argument: they exist, and so does every figure it names."""

from __future__ import annotations

import re
from pathlib import Path

from rose.config.server_settings import LendSettings
from rose.core.admission import STUCK_S, LendingLimits
from rose.core.breaker import WINDOW_S, BreakerLimits
from rose.core.bursts import BEYOND_SHARE, UNKNOWN_S
from rose.core.memory import MemoryLimits
from rose.core.slo import AT_RISK_SHARE, NEWEST_KEPT, Budgets
from rose.vllm.control_segment import Terms

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guarantee.md").read_text()


def test_every_test_that_is_named_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    there = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 20 and named <= there, named - there


def test_every_step_of_an_argument_names_a_test() -> None:
    rows = re.findall(r"^\| \d \|.*\|$", PAGE, re.MULTILINE)
    assert len(rows) == 14
    for row in rows:
        assert "`test_" in row.split("|")[-2], row


def test_the_figures_are_those_of_the_code() -> None:
    limits, breaker, memory = LendingLimits(), BreakerLimits(), MemoryLimits()
    assert (limits.block_share, limits.efficiency_min, STUCK_S) == (0.1, 0.8, 5.0)
    assert (AT_RISK_SHARE, BEYOND_SHARE, UNKNOWN_S) == (0.002, 0.001, 30.0)
    assert (Budgets(1.0, 1.0).slack_share, NEWEST_KEPT, memory.headroom_share) == (0.7, 1000, 0.2)
    assert LendSettings().answer_s == Terms("board").answer_s == 60.0
    assert (breaker.deadlines_lost_max, breaker.lost_share_max) == (3, 0.01)
    assert (breaker.late_share_max, breaker.late_steps_min) == (0.1, 10)
    assert (breaker.cool_down_s, breaker.late_cool_down_s, WINDOW_S) == (20.0, 5.0, 60.0)
