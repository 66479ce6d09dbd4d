"""benchmarks/sensitivity.py: every number is changed where it is used, and is as before afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import sensitivity
from scheduling import trajectories
from sensitivity import ADMISSION_KNOBS, DOUBLE, HALF, LENGTH_KNOBS, OFF, ROUTER_KNOBS, Knob

from rose.core import bursts, lengths
from rose.core.lengths import Lengths
from rose.core.routing_rules import RoutingCosts
from rose.sim import lent_timeline

KNOBS = (*ROUTER_KNOBS, *LENGTH_KNOBS, *ADMISSION_KNOBS)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_a_number_is_halved_doubled_and_taken_out_and_all_is_as_before(knob: Knob) -> None:
    before = (
        sensitivity.Router, sensitivity.SETUPS, lent_timeline.LendingLimits, lent_timeline.MemoryPolicy,
        lengths.FINISHED_MIN, bursts.BEYOND_SHARE, Lengths.remaining,
    )  # fmt: skip
    variants = dict(knob.variants())
    assert variants[HALF] == knob.value / 2 and variants[OFF] == knob.off and knob.off_is
    assert DOUBLE not in variants or variants[DOUBLE] <= knob.most
    for to in variants.values():
        with knob.change(to):
            pass
    assert before == (
        sensitivity.Router, sensitivity.SETUPS, lent_timeline.LendingLimits, lent_timeline.MemoryPolicy,
        lengths.FINISHED_MIN, bursts.BEYOND_SHARE, Lengths.remaining,
    )  # fmt: skip


def test_every_weight_of_the_router_is_varied() -> None:
    assert {knob.name for knob in ROUTER_KNOBS} == set(RoutingCosts.__dataclass_fields__)


def test_a_changed_weight_reaches_the_router() -> None:
    with ROUTER_KNOBS[0].change(0.5):
        assert sensitivity.Router("cost").settings.crowding == 0.5


def test_a_recording_in_characters_becomes_turns() -> None:
    turns: list[trajectories.PlannedTurn] = []
    for prompt, output in ((4000, 400), (4100, 0), (9000, 80)):
        row = {"prompt_chars": str(prompt), "out_chars": str(output), "obs_chars": "7"}
        trajectories._add_by_characters(turns, row)
    assert [(turn.prompt_tokens, turn.output_tokens) for turn in turns] == [(1000, 100), (1100, 1), (2250, 20)]
