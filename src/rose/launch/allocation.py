"""From the lines of a run: how often a device was borrowed and given back, and the share of time that it cost.

`core.allocation` says what counts. The gateway tells every cycle as it sees it; the run tells when it asked the owner
of the device, and when he had done it. A device is on its way from the moment that its owner is asked for it, and back
when both he and the gateway say so. Each attempt of a run that was resumed has its own clock and its own cycles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from rose.core.allocation import Cycle, allocation_overhead_s

Line = dict[str, Any]
ALLOCATION, ASKED = "allocation", "asked"
NAMES = {field.name for field in fields(Cycle)}


def allocation_of(lines: Sequence[Line]) -> Line:
    """Two figures: the share of the time of steps, None if nothing was borrowed, and how many cycles ended in it."""
    overhead_s = time_s = 0.0
    had = returned = 0
    for attempt in attempts(lines):
        steps = [line for line in attempt if line["kind"] == "step"]
        cycles = cycles_of(attempt)
        if steps:
            began_s, ended_s = steps[0]["began_s"], steps[-1]["began_s"] + steps[-1]["step_s"]
            time_s += ended_s - began_s
            overhead_s += allocation_overhead_s(cycles, began_s, ended_s)
            had += len(cycles)
            ends_s = [cycle.returned_s for cycle in cycles if cycle.returned_s is not None]
            returned += sum(began_s <= end_s <= ended_s for end_s in ends_s)
    share = overhead_s / time_s if had and time_s > 0 else None
    return {"allocation_overhead_share": share, "borrow_cycles": returned}


def attempts(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines of a run, parted where it went on after an interruption."""
    found: list[Line] = []
    for line in lines:
        if line["kind"] == "resume":
            yield found
            found = []
        found.append(line)
    yield found


def cycles_of(lines: Sequence[Line]) -> list[Cycle]:
    """Of one attempt, by the newest record of each, counted from asking."""
    newest = {line["number"]: line for line in lines if line["kind"] == ALLOCATION}
    cycles = [
        Cycle(**{key: value for key, value in newest[number].items() if key in NAMES}) for number in sorted(newest)
    ]
    count_from_asking(cycles, [line for line in lines if line["kind"] == ASKED])
    return cycles


def count_from_asking(cycles: Sequence[Cycle], asked: Sequence[Line]) -> None:
    """A device is on its way from the moment its owner was asked for it, or asks for it, not from when word arrives."""
    ends_s = [*(line["at_s"] for line in asked[1:]), math.inf]
    for line, end_s in zip(asked, ends_s):
        begin_s = line["at_s"]
        if line["is_lent"]:
            for cycle in (cycle for cycle in cycles if begin_s <= cycle.chosen_s < end_s):
                cycle.wanted_s = min(cycle.wanted_s, begin_s)
                break
        else:
            for cycle in (cycle for cycle in cycles if begin_s <= (cycle.returned_s or -1.0) < end_s):
                cycle.returned_s = begin_s
                if cycle.released_s is not None and "answered_s" in line:
                    cycle.released_s = max(cycle.released_s, float(line["answered_s"]))
                break
