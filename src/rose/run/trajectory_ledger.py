"""The ledger of trajectories: each that was begun comes back exactly once, or is written off.

A trajectory has one id everywhere: in the environment that plays it, in the gateway that keeps its tokens, and in the
batch that brings it to the trainer. Whatever process dies, at the end of a step no trajectory may be missing and none
may have come twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Balance:
    """Counts of trajectories: begun = returned + written_off + open + lost. `lost` and `doubled` are always faults."""

    begun: int = 0
    returned: int = 0
    written_off: int = 0  # its environment kept failing, or its group was surplus
    open: int = 0
    lost: int = 0
    doubled: int = 0
    unknown: int = 0  # came back and was never begun
    differing: int = 0  # came back with other tokens than were played


class TrajectoryLedger:
    """The ledger of one run; a resumed run continues from the balance in its checkpoint."""

    def __init__(self, before: Balance | None = None) -> None:
        before = before or Balance()
        self._before = replace(before, begun=before.begun - before.open, open=0)  # what was open is begun anew
        self._open: set[str] = set()
        self._returned: set[str] = set()
        self._written_off: set[str] = set()
        self._begun = self._lost = self._doubled = self._unknown = self._differing = 0

    def begin(self, trajectory_id: str) -> None:
        is_known = any(trajectory_id in ids for ids in (self._open, self._returned, self._written_off))
        assert not is_known, f"{trajectory_id} was begun before"
        self._open.add(trajectory_id)
        self._begun += 1

    def returned(self, trajectory_id: str, *, is_same: bool = True) -> bool:
        """Enter a trajectory that came back with a batch, and return whether it may be used."""
        if trajectory_id in self._returned:
            self._doubled += 1
            return False
        if trajectory_id not in self._open:
            self._unknown += 1
            return False
        self._open.discard(trajectory_id)
        self._returned.add(trajectory_id)
        self._differing += not is_same
        return is_same

    def write_off(self, trajectory_id: str) -> None:
        if trajectory_id in self._open:
            self._open.discard(trajectory_id)
            self._written_off.add(trajectory_id)

    def close_step(self, still_open: Iterable[str] = ()) -> Balance:
        """Count as lost what is open and not named here, because it will never come."""
        missing = self._open - set(still_open)
        self._open -= missing
        self._lost += len(missing)
        return self.balance()

    def balance(self, without: Iterable[str] = ()) -> Balance:
        """Return the balance as if `without` had never been begun; a run that resumes from it begins them anew."""
        before, anew = self._before, set(without)
        kinds = (self._returned, self._written_off, self._open)
        left_out = [len(ids & anew) for ids in kinds]
        returned, written_off, still_open = (len(ids) - count for ids, count in zip(kinds, left_out))
        return Balance(
            before.begun + self._begun - sum(left_out),
            before.returned + returned,
            before.written_off + written_off,
            still_open,
            before.lost + self._lost,
            before.doubled + self._doubled,
            before.unknown + self._unknown,
            before.differing + self._differing,
        )
