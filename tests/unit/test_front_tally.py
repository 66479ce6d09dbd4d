"""Counters go on over engines that come and go; nothing is counted twice while there is none."""

from __future__ import annotations

from dataclasses import replace

from rose.engines.base import EngineFacts
from rose.front.tally import Tally

FACTS = EngineFacts("0", 2, 1, 100, 40, 10, 16, 1024, 512, steps=5, generated_tokens=70)


def test_counters_survive_engines_and_levels_do_not():
    tally = Tally()
    tally.started(replace(FACTS, steps=0, generated_tokens=0))
    assert tally.total(FACTS).generated_tokens == 70
    tally.gone(FACTS)
    between = tally.total(None)
    assert (between.generated_tokens, between.steps, between.running, between.kv_blocks_used) == (70, 5, 0, 0)
    tally.started(replace(FACTS, steps=1, generated_tokens=3))
    assert tally.total(replace(FACTS, generated_tokens=4)).generated_tokens == 74
    tally.gone(replace(FACTS, generated_tokens=4))
    assert tally.total(None).generated_tokens == 74
