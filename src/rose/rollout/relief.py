"""Takes turns from where they do not get on, as far as somebody else has room for them.

Two kinds. On a member that says its gate is shut, because serving needs the device, nothing has gone wrong: those of
its turns that the router calls strays are asked back. On a member that is open and yet shows nothing, by the rule of
`core.stalls`, the turn is taken without asking, and the member is left alone for a while. A turn that nobody else could
take stays where it is: perhaps it comes to something, and it would be computed again for nothing.
"""

from __future__ import annotations

from rose.core.router import Place, Router
from rose.core.stalls import Stalls
from rose.rollout.live import LiveTurn
from rose.rollout.pool import Member, Pool
from rose.rollout.scheduler import Scheduler


class Relief:
    """One per gateway; looks around when it is told to."""

    def __init__(self, pool: Pool, scheduler: Scheduler, router: Router, stalls: Stalls) -> None:
        self._pool, self._scheduler, self._router, self._stalls = pool, scheduler, router, stalls

    def look(self, now_s: float) -> None:
        scheduler = self._scheduler
        scheduler.take_overdue(now_s)
        able = {member.name: member for member in self._pool if self._is_able(member, now_s)}
        room = sum(max(0, member.seats - len(member.tickets)) for member in able.values())
        room -= scheduler.waiting + scheduler.asked_back
        if room > 0:
            strays = self._router.strays(now_s, room)
            room -= sum(scheduler.evict(stray.turn_id, now_s) for stray in strays)
        for turn in scheduler.placed if room > 0 else ():
            member = turn.member
            if member is None or not self._may_be_stuck(turn, now_s) or len(able) == (member.name in able):
                continue
            room -= self._relieve(turn, member, now_s)
            if room <= 0:
                break
        scheduler.place(now_s)

    def _may_be_stuck(self, turn: LiveTurn, now_s: float) -> bool:
        return turn.asked_back_s is None and now_s - turn.progress_s > self._stalls.least_s

    def _relieve(self, turn: LiveTurn, member: Member, now_s: float) -> bool:
        """Whether the turn was stuck and could be taken from its member."""
        if not self._is_stuck(turn, member, now_s):
            return False
        until_s = self._stalls.mark(member.name, now_s)
        if until_s > now_s:
            self._scheduler.close(member, until_s, "it does not get on with its turns")
        if not self._elsewhere(turn, member, now_s):
            return False
        self._scheduler.counts.stalled += 1
        self._scheduler.take_back(turn, now_s)
        return True

    def _elsewhere(self, turn: LiveTurn, member: Member, now_s: float) -> bool:
        decision = self._router.choose(turn.view(), now_s)
        return isinstance(decision, Place) and decision.worker != member.name

    def _is_able(self, member: Member, now_s: float) -> bool:
        """Seats behind a gate that serving has shut are no room: whoever went there would only wait again."""
        view = self._pool.view(member)
        return view.is_open and view.gated_since_s is None and now_s >= member.closed_until_s

    def _is_stuck(self, turn: LiveTurn, member: Member, now_s: float) -> bool:
        """A member that says that its gate is shut, or that takes new weights, has its reason to be quiet."""
        if member.gate.gated_since_s is not None or member.is_taking:
            return False
        quiet_s = member.gate.quiet_s(turn.progress_s, now_s)
        first_of = turn.prompt_there if turn.is_first else None
        predicted_s = self._stalls.predicted_s(member.name, first_of=first_of, whole_s=turn.predicted_s)
        return self._stalls.is_stalled(member.name, quiet_s, predicted_s, now_s)
