"""Borrows devices while there is work for them, and gives them back.

Devices that can be borrowed are members like all others, for as long as their agents are connected; what changes is
whether they are *wanted*. `core.provision` decides that from what waits and runs and from what the members tell; here
its decisions are carried out, and how long they took is written down (`core.allocation`). A wish is reconciled, not
commanded once: a member that is not where it is wanted is told again.

An owner who takes a device back ends a cycle at once, and is not asked; when he offers it again it is used again, if it
still is wanted. A member that knows nothing of parking stays where it is, and gets no turns while it is not wanted.
One that is wanted and of no use for long, because its gate is shut, its weights are behind or none of its turns gets
on, is exchanged for another. Dedicated workers over the user's cap, those that came last, are not used.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator

from rose.core.allocation import Cycle, allocation_overhead_s, allocation_overhead_share
from rose.core.provision import Borrow, Demand, DeviceView, Provision, ProvisionRules
from rose.core.router import Router
from rose.rollout.messages import Activate, Park
from rose.rollout.pool import Member, Pool
from rose.rollout.scheduler import Scheduler

LOOK_S = 0.25
TELL_AGAIN_S = 5.0
CYCLES_KEPT = 1024
KV_WEIGHT = 0.2  # of the newest look at a device's memory
RATE_KEPT = 0.98  # of the best rate a worker has shown, from look to look while it works
SLOW_S = 5.0  # a dedicated worker that shows nothing for so long is not counted on
STUCK_S = 20.0  # none of its turns has shown anything for so long: many times the longest prompt
PATIENCE_S = 10.0  # with a borrowed device that can have no turns, while others could
AVOIDED_S = 30.0
JOINED, OFFERED, LOST = "it joined with its model at hand", "its owner offers it again", "it is gone"
USELESS = "it was of no use, and there is another"


class Provisioning:
    """One per gateway; `look` a few times a second, `note` whenever a member has said something."""

    def __init__(
        self,
        pool: Pool,
        scheduler: Scheduler,
        router: Router,
        rules: ProvisionRules,
        *,
        first_number: int = 1,
        began_s: float = 0.0,
    ) -> None:
        self.rules, self.began_s = rules, began_s
        self.borrows = self.returns = 0
        self._pool, self._scheduler, self._router = pool, scheduler, router
        self._provision = Provision(rules)
        self._numbers = itertools.count(first_number)
        self._past: deque[Cycle] = deque(maxlen=CYCLES_KEPT)
        self._open: dict[Member, Cycle] = {}  # until they are given back
        self._leaving: dict[Member, Cycle] = {}  # until they are gone
        self._kv_use: dict[Member, float] = {}
        self._best_tok_s: dict[Member, float] = {}
        self._usable_s: dict[Member, float] = {}  # when they last were
        self._avoided_until_s: dict[Member, float] = {}
        self._looked_s = -math.inf
        self._turns_well = math.inf  # more turns than these, and another device is wanted
        self._wanted_s: float | None = None  # since when there have been more

    @property
    def cycles(self) -> list[Cycle]:
        """The last ones, oldest first."""
        return sorted([*self._past, *self._leaving.values(), *self._open.values()], key=lambda cycle: cycle.number)

    @property
    def borrowed(self) -> int:
        return len(self._open)

    def overhead_s(self, now_s: float) -> float:
        """Time so far in which some device was being had or given back, by the cycles that are still known."""
        return allocation_overhead_s(self.cycles, self.began_s, now_s)

    def overhead_share(self, now_s: float) -> float | None:
        return allocation_overhead_share(self.cycles, self.began_s, now_s)

    # What happens

    def asked(self, now_s: float) -> None:
        """There is a turn more."""
        if self._wanted_s is None and self._turns() > self._turns_well:
            self._wanted_s = now_s

    def note(self, member: Member, now_s: float) -> None:
        """It joined, or has told how it is."""
        if member.kind != "borrowed":
            return
        is_ours = member.is_wanted and member.is_offered
        if is_ours and member not in self._open:
            self._begin(member, OFFERED if member in self._kv_use else JOINED, now_s)
        elif not is_ours and member in self._open:
            self._end(member, "its owner wants it back", now_s)
        self._note_progress(member, now_s)

    def lost(self, member: Member, now_s: float) -> None:
        """It is no member any more."""
        self._end(member, LOST, now_s)
        self._settle(member, now_s)
        for known in (self._kv_use, self._best_tok_s, self._usable_s, self._avoided_until_s):
            known.pop(member, None)

    def look(self, now_s: float) -> None:
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        members = list(self._pool)
        self._measure(members)
        self._cap_dedicated(members, now_s)
        borrowed = [member for member in members if member.kind == "borrowed"]
        self._avoid_useless(borrowed, now_s)
        devices = [self._device(member, now_s) for member in borrowed]
        for decision in self._provision.decide(self._demand(members, now_s), devices, now_s):
            member = self._pool.get(decision.name)
            assert member is not None
            why = USELESS if self._is_avoided(member, now_s) else decision.reason
            self._set_wanted(member, isinstance(decision, Borrow), why, now_s)
        self._turns_well = self._count_turns_well(members, now_s)
        if self._turns() <= self._turns_well:
            self._wanted_s = None
        self.asked(now_s)
        for member in members:
            self._reconcile(member, now_s)

    # Deciding

    def _count_turns_well(self, members: list[Member], now_s: float) -> float:
        """Infinite if there is nobody else to borrow."""
        is_another = any(member.kind == "borrowed" and member.is_offered and not member.is_wanted for member in members)
        if not is_another or self.borrowed >= self.rules.serving_max:
            return math.inf
        workers = self.borrowed + len(self._dedicated(members, now_s))
        return self.rules.turns_per_device * workers

    def _turns(self) -> int:
        return self._scheduler.waiting + self._scheduler.running

    def _demand(self, members: list[Member], now_s: float) -> Demand:
        dedicated = self._dedicated(members, now_s)
        rates = [beat.decode_tok_s for member in dedicated if (beat := member.beat) is not None]
        known = [rate for rate in rates if rate]
        turns = self._turns()
        return Demand(
            turns=turns,
            work_tokens=turns * self._router.usual_tokens,
            dedicated_workers=len(dedicated),
            dedicated_tok_s=sum(self._best_tok_s.get(member, 0.0) for member in dedicated),
            sequence_tok_s=sum(known) / len(known) if known else 0.0,
        )

    def _dedicated(self, members: list[Member], now_s: float) -> list[Member]:
        """Those that can be counted on; one that hangs must not keep others from being borrowed."""
        return [
            member
            for member in members
            if member.kind == "dedicated"
            and member.is_wanted
            and self._pool.takes_turns(member)
            and _gets_on(member, now_s, SLOW_S)
        ]

    def _avoid_useless(self, borrowed: list[Member], now_s: float) -> None:
        """One that was of no use for long is exchanged, if there are turns and there is another."""
        has_another = any(
            member.is_offered and not member.is_wanted and not self._is_avoided(member, now_s) for member in borrowed
        )
        for member, cycle in self._open.items():
            if _gets_on(member, now_s, STUCK_S) and self._pool.view(member).is_open:
                self._usable_s[member] = now_s
            useless_s = now_s - max(cycle.chosen_s, self._usable_s.get(member, cycle.chosen_s))
            if has_another and self._turns() and useless_s > PATIENCE_S:
                self._avoided_until_s[member] = now_s + AVOIDED_S

    def _is_avoided(self, member: Member, now_s: float) -> bool:
        return now_s < self._avoided_until_s.get(member, now_s)

    def _device(self, member: Member, now_s: float) -> DeviceView:
        beat = member.beat
        is_lent = member.is_offered and not member.draining
        return DeviceView(
            name=member.name,
            is_borrowed=member.is_wanted and is_lent,
            is_on_offer=is_lent and not self._is_avoided(member, now_s),
            kv_use=self._kv_use.get(member, 0.0),
            slack_s=(beat.slack_s if beat is not None else None) or 0.0,
            tok_s=self._best_tok_s.get(member, 0.0),
            activation_s=(beat.activation_s if beat is not None else None) or 0.0,
            turns=len(member.tickets),
        )

    def _measure(self, members: list[Member]) -> None:
        for member in members:
            beat = member.beat
            if beat is None:
                continue
            use = beat.kv_use if beat.kv_use is not None else 0.0
            before = self._kv_use.get(member, use)
            self._kv_use[member] = before + KV_WEIGHT * (use - before)
            if member.tickets:
                best = RATE_KEPT * self._best_tok_s.get(member, 0.0)
                self._best_tok_s[member] = max(best, beat.tokens_per_s)

    def _cap_dedicated(self, members: list[Member], now_s: float) -> None:
        dedicated = [member for member in members if member.kind == "dedicated"]
        most = self.rules.dedicated_max
        for rank, member in enumerate(sorted(dedicated, key=lambda member: member.lease)):
            is_wanted = most is None or rank < most
            if is_wanted != member.is_wanted:
                member.is_wanted = is_wanted
                self._scheduler.changed(member, now_s)

    # Doing

    def _set_wanted(self, member: Member, is_wanted: bool, why: str, now_s: float) -> None:
        member.is_wanted, member.told_wanted = is_wanted, None
        if is_wanted:
            self._begin(member, why, now_s)
        else:
            self._end(member, why, now_s)
        self._scheduler.changed(member, now_s)
        self._note_progress(member, now_s)

    def _reconcile(self, member: Member, now_s: float) -> None:
        beat = member.beat
        if member.kind != "borrowed" or beat is None or not beat.can_park or not member.is_offered or member.draining:
            return
        is_there = member.place in ("resident", "activating")
        if member.is_wanted == is_there:
            member.told_wanted = None
            return
        if member.told_wanted == member.is_wanted and now_s < member.tell_wanted_s:
            return
        member.told_wanted, member.tell_wanted_s = member.is_wanted, now_s + TELL_AGAIN_S
        member.send(Activate("there is work") if member.is_wanted else Park("there is no work"))

    # Writing down

    def _begin(self, member: Member, why: str, now_s: float) -> None:
        if member in self._open:
            return
        self._settle(member, now_s)
        wanted_s = now_s if self._wanted_s is None else self._wanted_s
        self._open[member] = Cycle(next(self._numbers), member.name, wanted_s, now_s, why)
        self._wanted_s = None
        self.borrows += 1

    def _end(self, member: Member, why: str, now_s: float) -> None:
        cycle = self._open.pop(member, None)
        if cycle is not None:
            cycle.returned_s, cycle.why_returned = now_s, why
            self._leaving[member] = cycle
            self.returns += 1

    def _settle(self, member: Member, now_s: float) -> None:
        """It has left."""
        cycle = self._leaving.pop(member, None)
        if cycle is not None:
            cycle.released_s = now_s
            self._past.append(cycle)

    def _note_progress(self, member: Member, now_s: float) -> None:
        beat, cycle = member.beat, self._open.get(member)
        if cycle is None:
            if member.place != "resident" or not member.is_offered or beat is None or not beat.can_park:
                self._settle(member, now_s)
            return
        for name, is_reached in self._milestones(member, now_s):
            if not is_reached:
                return
            if getattr(cycle, name) is None:
                setattr(cycle, name, now_s)

    def _milestones(self, member: Member, now_s: float) -> Iterator[tuple[str, bool]]:
        yield "activated_s", member.place == "resident"
        yield "synced_s", self._pool.may_run(member)
        yield "usable_s", self._pool.view(member).is_open and now_s >= member.closed_until_s


def _gets_on(member: Member, now_s: float, patience_s: float) -> bool:
    return not member.tickets or now_s - member.progress_s < patience_s
