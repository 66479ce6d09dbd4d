"""How many devices to borrow now, which, and when to give them back.

A device is worth borrowing if the work ends noticeably sooner with it. Work that is left is put against the rates of
those who would share it; a device that is not active yet helps only after its activation, so with little work left it
does not pay. And a device helps only if there are turns for it: never more devices than turns that run or wait, less
those that the others can hold well. Of the devices on offer the one with the lowest recent use of KV memory goes first,
then the one with the longest slack: it is the least likely to be reclaimed.

Devices go back at once when they are no longer on offer, when there is no work, or when the user's cap is lowered. One
that has had no turn for `idle_s` goes back if the rest would end hardly later without it. Two things keep this from
flapping: a device is kept for `hold_s` at least and one that went back is left alone for `rest_s`; and borrowing asks
for more gain than keeping does.

`serving_max` and `dedicated_max` are the user's caps. Dedicated workers cost nothing to keep, so all of them up to the
cap are counted in; borrowing never replaces them. Facts in, decisions out; the caller does what is decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ProvisionRules:
    """`serving_max` is the most devices to borrow, N_serving; `dedicated_max` the most dedicated workers, N_rl."""

    serving_max: int = 0
    dedicated_max: int | None = None
    # Of what a device would save if it were active at once and all work could be divided. By half, activation may take
    # half of the time that is left; to keep one that is active and has nothing to do, less is asked.
    gain_min: float = 0.5
    keep_gain_min: float = 0.1
    turns_per_device: float = 2.0  # fewer on every worker than this, and another device is not needed
    idle_s: float = 5.0
    hold_s: float = 15.0
    rest_s: float = 30.0

    def __post_init__(self) -> None:
        if self.serving_max < 0 or (self.dedicated_max is not None and self.dedicated_max < 0):
            raise ConfigError("a cap on devices is a number from 0 up", hint="give 0 to borrow none")
        if self.keep_gain_min > self.gain_min:
            raise ConfigError(
                "a device would be given back for what it was borrowed for",
                hint="keep_gain_min must not be above gain_min",
            )


@dataclass(frozen=True, slots=True)
class Demand:
    """What there is to do. `work_tokens` are expected to be generated still, `longest_tokens` by one trajectory."""

    turns: int = 0  # that run or wait
    work_tokens: float = 0.0
    longest_tokens: float = 0.0
    dedicated_workers: int = 0
    dedicated_tok_s: float = 0.0  # of all dedicated workers together
    sequence_tok_s: float = 0.0  # of one sequence; 0 if unknown


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device that its owner lends, or did. `tok_s` is what it would add, all sequences together."""

    name: str
    is_borrowed: bool
    is_on_offer: bool = True
    kv_use: float = 0.0  # by serving, lately, of its memory
    slack_s: float = 0.0
    tok_s: float = 0.0
    activation_s: float = 0.0
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Borrow:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Return:
    name: str
    reason: str


@dataclass(slots=True)
class _Seen:
    borrowed_s: float | None = None
    returned_s: float | None = None
    idle_since_s: float | None = None


class Provision:
    """One per job. Ask `decide` every second or so with all devices; do what it returns."""

    def __init__(self, rules: ProvisionRules | None = None) -> None:
        self.rules = rules or ProvisionRules()
        self._seen: dict[str, _Seen] = {}

    def decide(self, demand: Demand, devices: Sequence[DeviceView], now_s: float) -> list[Borrow | Return]:
        self._look(devices, now_s)
        borrowed = [device for device in devices if device.is_borrowed]
        returns: list[Borrow | Return] = list(self._returns(demand, borrowed, now_s))
        gone = {decision.name for decision in returns}
        kept = [device for device in borrowed if device.name not in gone]
        if returns or not demand.turns:
            return returns
        return list(self._borrows(demand, kept, [device for device in devices if not device.is_borrowed], now_s))

    def _look(self, devices: Sequence[DeviceView], now_s: float) -> None:
        """Remember since when devices are ours, and since when they do nothing."""
        names = {device.name for device in devices}
        for gone in [name for name in self._seen if name not in names]:
            del self._seen[gone]
        for device in devices:
            seen = self._seen.setdefault(device.name, _Seen())
            if device.is_borrowed and seen.borrowed_s is None:
                seen.borrowed_s, seen.returned_s = now_s, None
            elif not device.is_borrowed and seen.borrowed_s is not None:
                seen.borrowed_s, seen.returned_s = None, now_s
            if not device.is_borrowed or device.turns:
                seen.idle_since_s = None
            elif seen.idle_since_s is None:
                seen.idle_since_s = now_s

    # Giving back

    def _returns(self, demand: Demand, borrowed: list[DeviceView], now_s: float) -> Iterable[Return]:
        left = len(borrowed)
        for device in sorted(borrowed, key=_worst_first):
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

    # Borrowing

    def _borrows(
        self, demand: Demand, kept: list[DeviceView], others: list[DeviceView], now_s: float
    ) -> Iterable[Borrow]:
        count, rate_tok_s = len(kept), demand.dedicated_tok_s + sum(device.tok_s for device in kept)
        for device in sorted((device for device in others if self._may(device, now_s)), key=_best_first):
            if count >= self.rules.serving_max or not self._wants_more(demand, count):
                return
            if _gain(demand, rate_tok_s, device) < self.rules.gain_min:
                continue
            yield Borrow(device.name, _why_borrow(demand, rate_tok_s, device))
            count, rate_tok_s = count + 1, rate_tok_s + device.tok_s

    def _may(self, device: DeviceView, now_s: float) -> bool:
        returned_s = self._seen[device.name].returned_s
        return device.is_on_offer and (returned_s is None or now_s - returned_s >= self.rules.rest_s)

    def _wants_more(self, demand: Demand, borrowed: int) -> bool:
        dedicated = demand.dedicated_workers
        if self.rules.dedicated_max is not None:
            dedicated = min(dedicated, self.rules.dedicated_max)
        return demand.turns > self.rules.turns_per_device * (dedicated + borrowed)


def _gain(demand: Demand, rate_tok_s: float, joining: DeviceView) -> float:
    """How much sooner the rest ends with one more, over what it could save at best; 1 where nothing is known."""
    if demand.work_tokens <= 0 or rate_tok_s <= 0 or joining.tok_s <= 0:
        return 1.0
    ideal_s = demand.work_tokens / rate_tok_s - demand.work_tokens / (rate_tok_s + joining.tok_s)
    if ideal_s <= 0:  # less work than can be told from none
        return 1.0
    return (_left_s(demand, rate_tok_s) - _left_s(demand, rate_tok_s, joining)) / ideal_s


def _left_s(demand: Demand, rate_tok_s: float, joining: DeviceView | None = None) -> float:
    """Until all is done: by the work that is left or by its longest trajectory. Who joins helps after activation."""
    longest_s = demand.longest_tokens / demand.sequence_tok_s if demand.sequence_tok_s > 0 else 0.0
    left_s = demand.work_tokens / rate_tok_s
    if joining is not None and left_s > joining.activation_s:
        left_s = (demand.work_tokens + joining.tok_s * joining.activation_s) / (rate_tok_s + joining.tok_s)
    return max(longest_s, left_s)


def _why_borrow(demand: Demand, rate_tok_s: float, joining: DeviceView) -> str:
    if demand.work_tokens <= 0 or rate_tok_s <= 0 or joining.tok_s <= 0:
        return f"{demand.turns} turns, and nothing is known of how long they take"
    before_s, after_s = _left_s(demand, rate_tok_s), _left_s(demand, rate_tok_s, joining)
    return f"the rest would end in {after_s:.0f} s instead of {before_s:.0f}"


def _best_first(device: DeviceView) -> tuple[float, float, str]:
    return device.kv_use, -device.slack_s, device.name


def _worst_first(device: DeviceView) -> tuple[bool, int, float, float, str]:
    """Those that do nothing before those that work."""
    return device.turns > 0, device.turns, -device.kv_use, device.slack_s, device.name
