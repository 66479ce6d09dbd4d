"""The table of steps: complete, loadable, within half an hour."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.verify.verification_steps import STEPS, steps_named

BUDGET_MINUTES = 30.0


def test_all_steps_together_take_less_than_half_an_hour():
    assert sum(step.minutes for step in STEPS) < BUDGET_MINUTES


def test_names_are_unique_and_every_step_says_what_it_shows():
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert all(step.shows and step.minutes > 0 for step in STEPS)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_step_names_an_async_function(step):
    assert asyncio.iscoroutinefunction(step.load())


def test_a_trial_on_a_cpu_needs_no_gpu_except_where_it_makes_no_sense():
    needs = {step.name: step.needs_on(is_cpu=True) for step in STEPS}
    assert needs["page-calls"] == () and needs["idle"] == ("vllm",)
    assert "gpu" in needs["time-slices"] and "mps" in needs["mps"]


def test_steps_keep_their_order_whatever_order_they_are_named_in():
    assert [step.name for step in steps_named(["idle", "machine"])] == ["machine", "idle"]
    assert steps_named([]) == STEPS


def test_an_unknown_step_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="there is no step `xyzzy`") as refusal:
        steps_named(["xyzzy"])
    assert "serving-alone" in str(refusal.value)


def test_the_page_shows_this_table():
    page = (Path(__file__).parents[3] / "docs" / "verify.md").read_text(encoding="utf-8")
    rows = [f"| `{step.name}` | {step.shows} | {step.minutes:g} | {', '.join(step.needs) or '-'} |" for step in STEPS]
    assert "\n".join(rows) in page
    assert f"about {sum(step.minutes for step in STEPS):.0f} minutes" in page
