"""The loop of a device that is lent: two engines, two ports, one step at a time, serving first.

Between two steps it takes the commands of both sides, then asks the lender whose step is next. What goes wrong on the
rollout side stays there: an exception in its engine or port removes the rollout model from the device, a rollout front
that is gone leaves an empty seat, and serving goes on. What goes wrong on the serving side is the end of the process,
as on any other device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rose.core.breaches import Breach
from rose.coserve import messages
from rose.coserve.door import Door
from rose.coserve.guest import Guest
from rose.coserve.lending import Lender, NextStep
from rose.coserve.link import Closed, EngineLink, wait_any
from rose.coserve.owner import Owner
from rose.coserve.port import Port
from rose.engines.base import Budget

ASK_AGAIN_S = 0.05  # rollouts that may not run now could a little later, without anybody saying so


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
            on_gone=lender.serving_gone,
            on_control=owner.obey,
            lending=owner.status,
        )

    def run(self) -> None:
        serving = self._serving
        while True:
            serving.obey_all()
            self._hear_rollouts()
            if serving.leaving:
                return
            if serving.link.congested or not self._step():
                self._sleep()

    # Stepping

    def _step(self) -> bool:
        if self._guest.memory is not None and self._guest.is_here:
            self._guest.memory.observe()
        step = self._choose()
        if step is None:
            return False
        if step.side == "serving":
            self._run(self._serving, step)
        else:
            self._guarded(lambda port: self._run(port, step))
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
        started = port.started_by(step.plan)
        begin_s = self._now_s()
        events = port.engine.step(step.plan)
        end_s = self._now_s()
        port.send_step(step.plan, events, end_s - begin_s, started)
        for breach in self._lender.finish(step, events, begin_s, end_s):
            self._tell(breach)

    def _tell(self, breach: Breach) -> None:
        self._serving.link.send(messages.Breached(breach))

    def _sleep(self) -> None:
        port = self._guest.port
        ports = [self._serving] + ([port] if port is not None else [])
        for each in ports:
            each.tell_facts()
        has_rollouts = port is not None and self._lender.rollout.scheduler.has_work() and not self._lender.stopped
        guests = [self._door.fileno()] if self._door is not None and port is None else []
        wait_any([each.link for each in ports], ASK_AGAIN_S if has_rollouts else None, also=guests)

    # The rollout side

    def _hear_rollouts(self) -> None:
        guest = self._guest
        if guest.port is None and self._door is not None:
            link = self._door.accept()
            if link is not None:
                guest.attach(link)
        self._guarded(lambda port: port.obey_all())
        guest.finish_loading()
        if guest.port is not None and guest.port.leaving:
            guest.detach()

    def _guarded(self, work: Callable[[Port], None]) -> None:
        """Do something for the rollouts; whatever it raises, serving does not notice."""
        port = self._guest.port
        if port is None:
            return
        try:
            work(port)
        except Closed:
            self._guest.detach()
        except Exception as error:
            self._guest.fail(error)
