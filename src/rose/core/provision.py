"""Provisioning: how many devices to borrow, which, when to return them, and the time that a run spends on it.

A device is worth borrowing if the remaining work ends noticeably sooner with it. A device that is not active helps only
after its activation, so it does not pay off with little work left. There are never more devices than the turns can use.
The device with the lowest recent KV use of serving goes first, then the one with the most slack: it is the least likely
to be reclaimed.

A device goes back at once when its owner no longer offers it, when there is no work, or when the cap is lowered. One
without a turn for `idle_s` goes back if the work would end hardly later. Three things prevent flapping: a device is
kept for at least `hold_s`, rests for `rest_s` after its return, and borrowing needs more gain than keeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProvisionRules:
    """The rules: `serving_max` devices borrowed at most (N_serving), `dedicated_max` dedicated workers used (N_rl)."""

    serving_max: int = 0
    dedicated_max: int | None = None
    # Gains are shares of what a device would save if it were active at once and all work could be divided. At one half,
    # activation may take half of the remaining time. Keeping an idle active device needs less.
    gain_min: float = 0.5
    keep_gain_min: float = 0.1
    turns_per_device: float = 2.0  # with fewer on every worker, another device is not needed
    idle_s: float = 5.0
    hold_s: float = 15.0
    rest_s: float = 30.0

    def __post_init__(self) -> None:
        if self.serving_max < 0 or (self.dedicated_max is not None and self.dedicated_max < 0):
            raise ConfigError("a cap on devices is a number from 0 up", hint="give 0 to borrow none")
        if self.keep_gain_min > self.gain_min:
            raise ConfigError(
                "a device would be returned at a gain for which it was borrowed",
                hint="keep_gain_min must not be above gain_min",
            )


@dataclass(frozen=True, slots=True)
class Demand:
    """The remaining work: `work_tokens` to generate, and `longest_tokens` by one trajectory."""

    turns: int = 0  # that run or wait
    work_tokens: float = 0.0
    longest_tokens: float = 0.0
    dedicated_workers: int = 0
    dedicated_tok_s: float = 0.0  # of all dedicated workers together
    sequence_tok_s: float = 0.0  # of one sequence; 0 if unknown


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device that can be borrowed. `tok_s` is the throughput that it would add."""

    name: str
    is_borrowed: bool
    is_on_offer: bool = True
    kv_use: float = 0.0  # recent share of its KV memory that serving uses
    slack_s: float = 0.0
    tok_s: float = 0.0
    activation_s: float = 0.0
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Borrow:
    """Activate the device."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Return:
    """Return the device to its owner."""

    name: str
    reason: str


@dataclass(slots=True)
class _DeviceSample:
    borrowed_s: float | None = None
    returned_s: float | None = None
    idle_since_s: float | None = None


class Provision:
    """The provisioner of a job. Call `decide` about once a second with all devices, and execute what it returns."""

    def __init__(self, rules: ProvisionRules | None = None) -> None:
        self.rules = rules or ProvisionRules()
        self._seen: dict[str, _DeviceSample] = {}

    def decide(self, demand: Demand, devices: Sequence[DeviceView], now_s: float) -> list[Borrow | Return]:
        for name in self._seen.keys() - {device.name for device in devices}:
            del self._seen[name]
        for device in devices:
            self._record(device, now_s)
        borrowed = [device for device in devices if device.is_borrowed]
        returns: list[Borrow | Return] = list(self._returns(demand, borrowed, now_s))
        if returns or not demand.turns:
            return returns
        return list(self._borrows(demand, borrowed, [device for device in devices if not device.is_borrowed], now_s))

    def _record(self, device: DeviceView, now_s: float) -> None:
        """Record since when a device is borrowed and since when it is idle."""
        seen = self._seen.setdefault(device.name, _DeviceSample())
        if device.is_borrowed and seen.borrowed_s is None:
            seen.borrowed_s, seen.returned_s = now_s, None
        elif not device.is_borrowed and seen.borrowed_s is not None:
            seen.borrowed_s, seen.returned_s = None, now_s
        if not device.is_borrowed or device.turns:
            seen.idle_since_s = None
        elif seen.idle_since_s is None:
            seen.idle_since_s = now_s

    def _returns(self, demand: Demand, borrowed: list[DeviceView], now_s: float) -> Iterable[Return]:
        left = len(borrowed)
        for device in sorted(borrowed, key=lambda d: (d.turns > 0, d.turns, -d.kv_use, d.slack_s, d.name)):
            reason = self._why_return(demand, device, borrowed, left, now_s)
            if reason is not None:
                left -= 1
                yield Return(device.name, reason)

    def _why_return(
        self, demand: Demand, device: DeviceView, borrowed: list[DeviceView], left: int, now_s: float
    ) -> str | None:
        rules, seen = self.rules, self._seen[device.name]
        if not device.is_on_offer:
            return "its owner wants it back"
        if left > rules.serving_max:
            return f"{left} are borrowed, {rules.serving_max} are allowed"
        assert seen.borrowed_s is not None
        if now_s - seen.borrowed_s < max(rules.hold_s, device.activation_s):
            return None
        if seen.idle_since_s is None or now_s - seen.idle_since_s < rules.idle_s:
            return None
        if not demand.turns:
            return "there is no work"
        rate_tok_s = demand.dedicated_tok_s + sum(other.tok_s for other in borrowed) - device.tok_s
        gain = _gain(demand, rate_tok_s, replace(device, activation_s=0.0))
        if gain > rules.keep_gain_min and self._wants_more(demand, left - 1):
            return None
        return f"it has had nothing to do for {now_s - seen.idle_since_s:.0f} s"

    def _borrows(
        self, demand: Demand, kept: list[DeviceView], others: list[DeviceView], now_s: float
    ) -> Iterable[Borrow]:
        count, rate_tok_s = len(kept), demand.dedicated_tok_s + sum(device.tok_s for device in kept)
        for device in sorted(others, key=lambda device: (device.kv_use, -device.slack_s, device.name)):
            returned_s = self._seen[device.name].returned_s
            if not device.is_on_offer or (returned_s is not None and now_s - returned_s < self.rules.rest_s):
                continue
            if count >= self.rules.serving_max or not self._wants_more(demand, count):
                return
            if _gain(demand, rate_tok_s, device) < self.rules.gain_min:
                continue
            reason = f"{demand.turns} turns of unknown length"
            if demand.work_tokens > 0 and rate_tok_s > 0 and device.tok_s > 0:
                before_s, after_s = _left_s(demand, rate_tok_s), _left_s(demand, rate_tok_s, device)
                reason = f"the remaining work would end in {after_s:.0f} s instead of {before_s:.0f}"
            yield Borrow(device.name, reason)
            count, rate_tok_s = count + 1, rate_tok_s + device.tok_s

    def _wants_more(self, demand: Demand, borrowed: int) -> bool:
        dedicated = demand.dedicated_workers
        if self.rules.dedicated_max is not None:
            dedicated = min(dedicated, self.rules.dedicated_max)
        return demand.turns > self.rules.turns_per_device * (dedicated + borrowed)


def _gain(demand: Demand, rate_tok_s: float, joining: DeviceView) -> float:
    """Return the time saved by another device over the most it could save; 1 if unknown."""
    if demand.work_tokens <= 0 or rate_tok_s <= 0 or joining.tok_s <= 0:
        return 1.0
    ideal_s = demand.work_tokens / rate_tok_s - demand.work_tokens / (rate_tok_s + joining.tok_s)
    if ideal_s <= 0:  # too little work to tell
        return 1.0
    return (_left_s(demand, rate_tok_s) - _left_s(demand, rate_tok_s, joining)) / ideal_s


def _left_s(demand: Demand, rate_tok_s: float, joining: DeviceView | None = None) -> float:
    """Return the time until all work is done, by its sum or its longest trajectory."""
    longest_s = demand.longest_tokens / demand.sequence_tok_s if demand.sequence_tok_s > 0 else 0.0
    left_s = demand.work_tokens / rate_tok_s
    if joining is not None and left_s > joining.activation_s:
        left_s = (demand.work_tokens + joining.tok_s * joining.activation_s) / (rate_tok_s + joining.tok_s)
    return max(longest_s, left_s)


@dataclass(slots=True)
class Cycle:
    """One borrowing of one device; moments in the future are None. A device that died counts as returned."""

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
        """Yield the intervals in which the device was wanted but not usable, or was being returned."""
        gone_s = self.returned_s if self.returned_s is not None else until_s
        yield self.wanted_s, min(gone_s, self.usable_s if self.usable_s is not None else until_s)
        if self.returned_s is not None:
            yield self.returned_s, self.released_s if self.released_s is not None else until_s


def allocation_overhead_s(cycles: Iterable[Cycle], began_s: float, ended_s: float) -> float:
    """Return the time in which some device was being borrowed or returned; overlaps count once."""
    spans = sorted(span for cycle in cycles for span in cycle.overheads_s(ended_s))
    total_s, done_s = 0.0, began_s
    for begin_s, end_s in spans:
        begin_s, end_s = max(begin_s, done_s), min(end_s, ended_s)
        if end_s > begin_s:
            total_s, done_s = total_s + end_s - begin_s, end_s
    return total_s


def allocation_overhead_share(cycles: Iterable[Cycle], began_s: float, ended_s: float) -> float | None:
    """Return that time as a share of the run, or None for an empty run."""
    if ended_s <= began_s:
        return None
    return allocation_overhead_s(cycles, began_s, ended_s) / (ended_s - began_s)
