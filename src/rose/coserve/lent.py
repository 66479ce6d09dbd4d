"""The loop of a device that is lent: two engines, two ports, one step at a time, serving first.

Between two steps it takes the commands of both sides, then asks the lender whose step is next. Serving's commands are
taken last, so that a decision knows of everybody who has come, and rollouts' for a millisecond at most: a flood of them
is heard over many steps. What goes wrong on the rollout side stays there: an exception in its engine, memory or port,
by the owner's word or without, removes the rollout model from the device; a rollout front that is gone leaves an empty
seat; for one that does not read nothing more is made, and in the end it is given up; serving goes on. What goes wrong
on the serving side is the end of the process, as on any other device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from rose.core.breaches import Breach
from rose.coserve import messages
from rose.coserve.door import Door
from rose.coserve.guest import Guest
from rose.coserve.lending import Lender, NextStep
from rose.coserve.link import Closed, EngineLink, wait_any
from rose.coserve.owner import Owner
from rose.coserve.port import Port
from rose.engines.base import Budget
from rose.errors import RequestRefused, RoseError

ASK_AGAIN_S = 0.05  # rollouts that may not run now could a little later, without anybody saying so
ROLLOUTS_HEARD_S = 0.001  # between two steps: some dozens of turns, and little beside a step
UNREAD = "the rollouts' front does not read what was made for it"


class LentExecutor:
    """`run` returns when the serving front says so, and raises Closed without one."""

    def __init__(
        self,
        lender: Lender,
        guest: Guest,
        owner: Owner,
        serving: EngineLink,
        *,
        budget: Budget,
        door: Door | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lender, self._guest, self._owner, self._door = lender, guest, owner, door
        self._now_s = now_s
        self._serving = Port(
            lender.serving,
            serving,
            budget,
            now_s=now_s,
            on_add=lender.serving_added,
            on_gone=self._serving_gone,
            on_control=self._obey_owner,
            lending=self._status,
        )

    def take_over(self, lend: messages.Lend) -> None:
        """Before `run`: what held for lending in the engine before this one."""
        self._guarded(partial(self._owner.take_over, lend))

    def run(self) -> None:
        serving = self._serving
        while True:
            self._hear_rollouts()
            serving.obey_all()
            if serving.leaving:
                return
            serving.link.flush()
            if serving.link.congested or not self._step():
                self._sleep()

    # Stepping

    def _step(self) -> bool:
        guest = self._guest
        if guest.memory is not None and guest.is_here:
            self._guarded(guest.memory.observe)
        self._lender.held_up = UNREAD if guest.port is not None and guest.port.link.congested else ""
        self._guarded(guest.notice_gate)
        step = self._choose()
        if step is None:
            return False
        if step.side == "serving":
            self._run(self._serving, step)
        elif guest.port is not None:
            self._guarded(partial(self._run, guest.port, step))
        return True

    def _choose(self) -> NextStep | None:
        try:
            return self._lender.next_step(self._now_s())
        except Exception as error:
            if self._guest.failure:
                raise
            self._guest.fail(error)  # if it was serving's planning after all, the next one raises
            return self._lender.next_step(self._now_s())

    def _run(self, port: Port, step: NextStep) -> None:
        if not self._lender.may_begin(step, self._now_s()):
            return
        started = port.started_by(step.plan)
        begin_s = self._now_s()
        events = port.engine.step(step.plan)
        end_s = self._now_s()
        port.send_step(step.plan, events, end_s - begin_s, started)
        for breach in self._lender.finish(step, events, begin_s, end_s):
            self._tell(breach)

    def _serving_gone(self, request_id: str) -> None:
        for breach in self._lender.serving_gone(request_id, self._now_s()):
            self._tell(breach)

    def _tell(self, breach: Breach) -> None:
        self._serving.link.send(messages.Breached(breach))

    def _sleep(self) -> None:
        self._serving.tell_facts()
        self._guarded(self._tell_rollouts)
        port = self._guest.port
        ports = [self._serving] + ([port] if port is not None else [])
        has_rollouts = port is not None and self._lender.rollout.scheduler.has_work() and not self._lender.stopped
        guests = [self._door.fileno()] if self._door is not None and port is None else []
        wait_any([each.link for each in ports], ASK_AGAIN_S if has_rollouts else math.inf, also=guests)
        self._serving.link.check()

    # The rollout side

    def _hear_rollouts(self) -> None:
        self._guarded(self._obey_rollouts)
        self._guarded(self._guest.finish_loading)

    def _obey_rollouts(self) -> None:
        guest = self._guest
        if guest.port is None and self._door is not None:
            link = self._door.accept()
            if link is not None:
                guest.attach(link)
        port = guest.port
        if port is None:
            return
        port.obey_all(ROLLOUTS_HEARD_S)
        port.link.flush()
        if port.leaving or port.link.is_stalled or port.link.is_overfull:
            guest.detach()

    def _tell_rollouts(self) -> None:
        if self._guest.port is not None:
            self._guest.port.tell_facts()

    def _obey_owner(self, control: messages.Control) -> None:
        """The owner's word is carried out by rollouts' code: what fails there is theirs, and he is told."""
        try:
            self._owner.obey(control)
        except RoseError:
            raise
        except Exception as error:
            self._guest.fail(error)
            raise RequestRefused(self._guest.failure, hint="restart the device to lend it again") from error

    def _status(self) -> messages.LendingStatus | None:
        """In every reply to serving, made by rollouts' code: if that fails serving is told so, or at worst nothing."""
        try:
            return self._owner.status()
        except Exception as error:
            if self._guest.failure:
                return None
            self._guest.fail(error)
            return self._status()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do something for the rollouts; whatever it raises, serving does not notice."""
        try:
            work()
        except Closed:
            self._guarded(self._guest.detach)
        except Exception as error:
            self._guest.fail(error)
