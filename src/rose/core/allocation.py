"""What it costs in time to have devices come and go.

A *cycle* is one borrowing of one device: it is wanted, chosen, activated, has the right weights, is usable, is given
back, and is its owner's again. From the moment it is wanted until it is usable, and from the moment it is given back
until it is gone, it does nothing for anybody. The share of a run's time in which that is so for some device is the
*allocation overhead*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Cycle:
    """One borrowing of one device; moments that have not come are None. A device that died gave itself back."""

    number: int
    name: str
    wanted_s: float
    chosen_s: float
    why: str = ""
    activated_s: float | None = None
    synced_s: float | None = None
    usable_s: float | None = None
    returned_s: float | None = None
    released_s: float | None = None
    why_returned: str = ""

    def overheads_s(self, until_s: float) -> Iterator[tuple[float, float]]:
        """From when to when the device was wanted and not usable, or on its way back."""
        gone_s = self.returned_s if self.returned_s is not None else until_s
        yield self.wanted_s, min(gone_s, self.usable_s if self.usable_s is not None else until_s)
        if self.returned_s is not None:
            yield self.returned_s, self.released_s if self.released_s is not None else until_s


def allocation_overhead_s(cycles: Iterable[Cycle], began_s: float, ended_s: float) -> float:
    """Time between these moments in which some device was being had or given back; what overlaps counts once."""
    spans = sorted(span for cycle in cycles for span in cycle.overheads_s(ended_s))
    total_s, done_s = 0.0, began_s
    for begin_s, end_s in spans:
        begin_s, end_s = max(begin_s, done_s), min(end_s, ended_s)
        if end_s > begin_s:
            total_s, done_s = total_s + end_s - begin_s, end_s
    return total_s


def allocation_overhead_share(cycles: Iterable[Cycle], began_s: float, ended_s: float) -> float | None:
    """The same as a share of that time; None if there was none."""
    if ended_s <= began_s:
        return None
    return allocation_overhead_s(cycles, began_s, ended_s) / (ended_s - began_s)
