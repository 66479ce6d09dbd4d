"""Everything the gateway decides, without sockets, tasks or a clock.

`Books` joins the pool, the scheduler, the provisioning, the trajectories and the ledger: members join, speak and are
lost; trainers publish versions and take batches; environments begin trajectories, ask for turns and finish. Every call
says what time it is. What comes of it goes to members by their `send`, to readers by their mailbox, and to the ledger;
readers are told only what `settle` has made durable. The gateway calls it from its event loop, a simulation from its
virtual one.

`tick` is to be called a few times a second. A gap between two ticks means that it was the gateway that stood still, not
the members: leases and turns are then given time anew.

Given the ledger of an earlier life, the books begin where that ended, and turns that were under way are run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from rose.bounds import INT32_MAX
from rose.config.gateway import GatewaySettings
from rose.core.provision import ProvisionRules
from rose.core.router import Router
from rose.core.stalls import Stalls
from rose.coserve.mailbox import Mailbox
from rose.engines.base import Request, Sampling
from rose.errors import Unavailable
from rose.rollout.ledger import Ledger, NoLedger
from rose.rollout.messages import Beat, Join, NewVersion, Refused, ToGateway, Tokens, VersionReady
from rose.rollout.pool import Member, Pool, Send
from rose.rollout.proof import proved, released
from rose.rollout.provisioning import Provisioning
from rose.rollout.recalling import recall
from rose.rollout.relief import Relief
from rose.rollout.room import MIB, Room
from rose.rollout.scheduler import Scheduler
from rose.rollout.sessions import Finish, KeptTurn, Session
from rose.rollout.trajectories import Batch, Trajectories

STOOD_STILL_S = 1.0  # between two ticks
DEVICES_MAX = 1 << 20  # where the user sets no cap
HOLD_S = 15.0  # for what it takes to have one: weights that are behind, prompts that are nowhere
REST_S = 2.0  # a few beats: what a device says of itself is news again
NO_VERSION_YET = "0"  # what devices call the weights they were started with


class Books:
    """`on_news` is called when a group may be complete or a member has taken a version; `on_change` with the pool."""

    def __init__(
        self,
        model: str,
        settings: GatewaySettings,
        ledger: NoLedger | None = None,
        *,
        vocabulary: int = INT32_MAX,
        now_s: float = 0.0,
    ) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self.ledger = ledger = ledger if ledger is not None else NoLedger()
        first = ledger.first_number
        self.pool = Pool(model, settings.lease_s, max_staleness=settings.max_staleness, first_lease=first)
        router, stalls = Router(settings.router, gate_patience_s=settings.gated_s), Stalls()
        self.scheduler = Scheduler(
            self.pool,
            waiting_max=settings.max_waiting,
            wait_s=settings.wait_s,
            router=router,
            stalls=stalls,
            first_ticket=first,
            vocabulary=vocabulary,
        )
        self.relief = Relief(self.pool, self.scheduler, router, stalls)
        self.provisioning = Provisioning(
            self.pool, self.scheduler, router, provision_rules(settings), first_number=first, began_s=now_s
        )
        room = Room(settings.max_kept_mb * MIB, settings.max_session_mb * MIB)
        self.trajectories = Trajectories(settings.max_trajectories, settings.idle_s, ledger, room=room)
        self._ticked_s = now_s
        if isinstance(ledger, Ledger):
            self._recall(ledger, now_s)

    # What members do

    def join(self, join: Join, send: Send, now_s: float) -> Member:
        """Raises RequestRefused for a name that is taken or another model."""
        member = self.pool.join(join, send, now_s)
        self.joined(member, now_s)
        return member

    def joined(self, member: Member, now_s: float) -> None:
        self.pool.catch_up(member, now_s)
        self._changed(member, now_s)

    def heard(self, member: Member, message: ToGateway, now_s: float) -> None:
        """Nothing is heard from a member whose lease is over."""
        self._notice_gap(now_s)
        if now_s > member.lease_until_s:
            self.lost(member, now_s)
        if not self.pool.has(member):
            self.scheduler.counts.late += len(message.pieces) if isinstance(message, Tokens) else 0
            return
        match message:
            case Tokens():
                self.scheduler.heard_tokens(member, proved(self.pool, member, message), now_s)
            case Beat():
                self.pool.heard(member, message, now_s)
                self._changed(member, now_s)
                self._release(member, now_s)
            case Refused():
                self.scheduler.heard_refused(member, message, now_s)
            case VersionReady():
                self.pool.version_ready(member, message, now_s)
                self._changed(member, now_s)
                self._release(member, now_s)
                self.on_news()

    def lost(self, member: Member, now_s: float) -> None:
        """Its connection ended, or its lease did."""
        if self.pool.remove(member):
            member.close()
            self.provisioning.lost(member, now_s)
            self.scheduler.lost(member, now_s)
            self.on_change()
            self.on_news()

    def drain(self, member: Member, now_s: float) -> None:
        self.scheduler.drain(member, now_s)

    # What trainers and environments do

    def publish(self, version: NewVersion, now_s: float) -> None:
        """Raises Unavailable."""
        self.check()
        self.pool.publish(version, now_s)
        self.ledger.published(self.pool.published)
        for member in self.pool:
            self._changed(member, now_s)
        self.on_change()

    def begin(
        self,
        trajectory_id: str,
        now_s: float,
        *,
        group: str | None = None,
        group_size: int = 1,
        task: str = "",
        seed: int | None = None,
        secret: str | None = None,
        is_trusted: bool = True,
    ) -> Session:
        """Raises QueueFull, RequestRefused, Unavailable."""
        self.check()
        return self.trajectories.begin(
            trajectory_id,
            now_s,
            group=group,
            group_size=group_size,
            task=task,
            seed=seed,
            secret=secret,
            is_trusted=is_trusted,
        )

    def ask(
        self,
        trajectory_id: str,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        reader: Mailbox,
        now_s: float,
        *,
        seed: int | None = None,
        whole: bool = True,
    ) -> KeptTurn:
        """One request for a turn, new or repeated. Raises QueueFull, RequestRefused, Unavailable."""
        session = self.trajectories.open(trajectory_id, now_s)
        turn, dice = session.turn_of(prompt_ids, sampling, seed)
        request = Request(self.next_try(turn), prompt_ids, msgspec.structs.replace(sampling, seed=dice))
        self.turn(turn, request, reader, now_s, affinity=trajectory_id, whole=whole)
        return turn

    @staticmethod
    def next_try(turn: KeptTurn) -> str:
        """The id of one more request for this turn."""
        turn.tries += 1
        return f"{turn.key}#{turn.tries - 1}"

    def turn(
        self, turn: KeptTurn, request: Request, reader: Mailbox, now_s: float, *, affinity: str, whole: bool
    ) -> None:
        """Read a turn, and run it unless it runs or has ended. Who wants it whole is told when it has ended."""
        self.check()
        if turn.finish_reason is not None or not whole:
            turn.replay(request.request_id, reader, self.version)
        if turn.finish_reason is not None:
            return
        if not turn.is_running:
            if not turn.is_kept:
                raise Unavailable("this turn was given up just now; send the request again")
            self._run(turn, request, affinity, now_s)
        (turn.waiters if whole else turn.readers)[request.request_id] = reader

    def cut(self, turn: KeptTurn, tokens: int, now_s: float) -> None:
        """The turn ends here: its text met a stop string, which the engine knows nothing of."""
        if turn.is_running:
            self.scheduler.cancel([turn.run_id], now_s)
        turn.cut(tokens)

    def finish(self, name: str, finish: Finish, now_s: float, *, is_trusted: bool = True) -> Session:
        """Raises KeyError, RequestRefused, Unavailable."""
        self.check()
        known = self.trajectories.get(name, is_trusted=is_trusted)
        is_new = known is not None and known.finish is None
        turns = list(known.turns) if known is not None and is_new else []
        session = self.trajectories.finish(name, finish, now_s, is_trusted=is_trusted)
        if is_new:
            self._abandon(turns, now_s)
            tokens = sum(len(turn.produced) for turn in turns)
            self.scheduler.finished(session.trajectory_id, session.group_id, len(turns), tokens)
            self.on_news()
        return session

    def batch(self, groups: int, after: int) -> Batch | None:
        """Raises RequestRefused, Unavailable."""
        self.check()
        return self.trajectories.batch(groups, after)

    # What time does

    def tick(self, now_s: float) -> None:
        """Raises Unavailable if the ledger is broken: only another life can go on."""
        if self.ledger.broken is not None:
            raise Unavailable("an error of the gateway in writing its ledger") from self.ledger.broken
        self._notice_gap(now_s)
        for member in self.pool.expired(now_s):
            self.lost(member, now_s)
        self.provisioning.look(now_s)
        self.relief.look(now_s)  # and a member that had closed itself for a while may be open again
        self.scheduler.expire(now_s)
        if self.ledger.trouble is None:
            for session in self.trajectories.idle(now_s):
                self.finish(session.name, Finish(is_lost=True), now_s)
        self.settle()

    def next_s(self) -> float | None:
        """When a tick is wanted before the next one is due."""
        return self.scheduler.next_s()

    def settle(self) -> None:
        """Make durable what was noted; then readers are told."""
        self.ledger.commit()

    def check(self) -> None:
        """Raises Unavailable while nothing can be made durable."""
        if self.ledger.trouble is not None:
            raise self.ledger.trouble

    @property
    def version(self) -> str:
        """That turns run on now."""
        return self.pool.wanted_version or next((member.version for member in self.pool), NO_VERSION_YET)

    def _run(self, turn: KeptTurn, request: Request, affinity: str, now_s: float, *, is_known: bool = False) -> None:
        try:
            if not is_known:
                self.scheduler.check_room()
            turn.runs(request)
            self.scheduler.submit(
                request,
                turn,
                now_s,
                affinity=affinity,
                group=turn.group_id,
                produced=turn.produced,
            )
        except BaseException:
            turn.give_up()
            raise
        self.provisioning.asked(now_s)

    def _abandon(self, turns: Iterable[KeptTurn], now_s: float) -> None:
        """Their trajectory is over: nobody will read them."""
        for turn in turns:
            if turn.is_running:
                self.scheduler.cancel([turn.run_id], now_s)
                turn.fail(Unavailable("the trajectory was finished while this turn ran"))

    def _changed(self, member: Member, now_s: float) -> None:
        self.on_change()
        self.scheduler.changed(member, now_s)
        self.provisioning.note(member, now_s)

    def _release(self, member: Member, now_s: float) -> None:
        """It may have proved its weights: tokens that waited for it are heard."""
        if member.withheld:
            self.scheduler.heard_tokens(member, released(self.pool, member), now_s)

    def _notice_gap(self, now_s: float) -> None:
        if now_s - self._ticked_s > STOOD_STILL_S:
            self.pool.renew(now_s)
            self.scheduler.woke(now_s)
        self._ticked_s = max(self._ticked_s, now_s)

    def _recall(self, ledger: Ledger, now_s: float) -> None:
        memory = recall(ledger, self.trajectories.room, now_s)
        self.pool.restore(memory.versions)
        self.trajectories.restore(memory.trajectories)
        for found in memory.under_way:
            ledger.adopt(found.turn, found.under_way)
            self._run(found.turn, found.request, found.session.trajectory_id, now_s, is_known=True)


def provision_rules(settings: GatewaySettings) -> ProvisionRules:
    """A device that is parked is back in a moment, so one that went back need hardly rest."""
    most = settings.borrowed_max if settings.borrowed_max is not None else DEVICES_MAX
    idle_s = settings.return_after_s
    return ProvisionRules(most, settings.dedicated_max, idle_s=idle_s, hold_s=min(HOLD_S, idle_s), rest_s=REST_S)
