"""The loop of a co-serving device: two engines, two servers, one step at a time, serving first.

Between two steps it takes the commands of both sides, then asks the step arbiter whose step is next. Serving's commands
are taken last, so that a decision knows of every user, and rollouts' for a millisecond at most. What fails on the
rollout side stays there: an exception in its engine, memory, server or admin controls removes the rollout model from
the device; a rollout front that is gone is waited for, and one that does not read is given up in the end; serving goes
on. What fails on the serving side is the end of the process, as on any other device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from rose.core.lending_state import RESTART
from rose.device import engine_messages
from rose.device.admin_controls import AdminControls
from rose.device.engine_server import EngineServer
from rose.device.residency import RolloutResidency
from rose.device.step_arbiter import StepArbiter, StepDecision
from rose.device.transport import Closed, EngineLink, RolloutListener, wait_any
from rose.engines.base import LendingStatus
from rose.errors import RequestRefused, RoseError

ASK_AGAIN_S = 0.05  # rollouts that may not run now could a little later, without any command
PAUSE_S = 0.0002  # work between two steps that is shorter is lost in the noise of a step
HISTORY_EVERY_S = 5.0  # an engine that ends loses what it learnt since
ROLLOUT_COMMANDS_S = 0.001  # between two steps: some dozens of turns, and little beside a step
UNREAD = "the rollouts' front does not read what was made for it"


class CoServingExecutor:
    """The loop of one device. `run` returns after a Shutdown of the serving front, and raises Closed without one."""

    def __init__(
        self,
        arbiter: StepArbiter,
        residency: RolloutResidency,
        controls: AdminControls,
        serving: EngineLink,
        *,
        listener: RolloutListener | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arbiter, self._residency, self._controls, self._listener = arbiter, residency, controls, listener
        self._now_s, self._next_history_s = now_s, 0.0
        self._serving = EngineServer(
            arbiter.serving,
            serving,
            now_s=now_s,
            on_add=arbiter.on_serving_added,
            on_gone=self._on_serving_gone,
            on_control=self._control,
            lending=self._status,
            steps=lambda: controls.recorded_steps(),
        )

    def take_over(self, lend: engine_messages.Lend) -> None:
        """Restore what held for lending in the engine before this one; to be called before `run`."""
        self._guard(partial(self._controls.take_over, lend))

    def run(self) -> None:
        serving = self._serving
        while True:
            self._charge(self._handle_rollouts)
            serving.handle_commands()
            if serving.is_leaving:
                return
            serving.link.flush()
            if serving.link.is_congested or not self._step():
                self._sleep()

    def _step(self) -> bool:
        """Run the next step of either side, and return whether there was one that might run."""
        residency, arbiter, now_s = self._residency, self._arbiter, self._now_s
        if residency.memory is not None and residency.is_resident:
            self._charge(partial(self._guard, residency.memory.observe))
        if (at_s := now_s()) >= self._next_history_s:
            self._next_history_s = at_s + HISTORY_EVERY_S
            self._serving.link.send(engine_messages.Learnt(arbiter.admission.history.snapshot(at_s)))
        arbiter.blocked = UNREAD if residency.server is not None and residency.server.link.is_congested else ""
        self._guard(residency.report_if_blocked)
        try:
            step = arbiter.next_step(now_s())
        except Exception as error:
            if residency.failure:
                raise
            residency.fail(error)  # if it was serving's planning after all, the next one raises
            step = arbiter.next_step(now_s())
        if step is None:
            return False
        if step.side == "serving":
            self._run(self._serving, step)
        elif residency.server is not None:
            self._guard(partial(self._run, residency.server, step))
        return True

    def _run(self, server: EngineServer, step: StepDecision) -> None:
        if self._arbiter.may_begin(step, self._now_s()):
            events, begin_s, end_s = server.run_step(step.plan)
            for breach in self._arbiter.finish(step, events, begin_s, end_s):
                self._serving.link.send(engine_messages.Breached(breach))

    def _on_serving_gone(self, request_id: str) -> None:
        for breach in self._arbiter.on_serving_gone(request_id, self._now_s()):
            self._serving.link.send(engine_messages.Breached(breach))

    def _sleep(self) -> None:
        self._serving.send_facts()
        if self._residency.server is not None:
            self._guard(self._residency.server.send_facts)
        rollouts, arbiter = self._residency.server, self._arbiter  # a failure may just have removed it
        links, also, limit_s = [self._serving.link], list[int](), math.inf
        if rollouts is not None:
            links.append(rollouts.link)
            if arbiter.rollout.scheduler.has_work() and not arbiter.stopped:
                limit_s = ASK_AGAIN_S
        elif self._listener is not None:
            also.append(self._listener.fileno())
        wait_any(links, limit_s, also=also)
        self._serving.link.check()

    def _charge(self, work: Callable[[], None]) -> None:
        """Do work for the rollout side; if it takes long and serving waits, it counts as a lent step."""
        begin_s = self._now_s()
        work()
        end_s = self._now_s()
        if end_s - begin_s > PAUSE_S and self._arbiter.serving.scheduler.has_work():
            self._arbiter.charge_pause(begin_s, end_s)

    # The rollout side

    def _handle_rollouts(self) -> None:
        self._guard(self._handle_rollout_commands)
        self._guard(self._residency.finish_loading)

    def _handle_rollout_commands(self) -> None:
        residency = self._residency
        if residency.server is None and self._listener is not None and (link := self._listener.accept()) is not None:
            residency.attach(link)
        server = residency.server
        if server is not None:
            server.handle_commands(ROLLOUT_COMMANDS_S)
            server.link.flush()
            if server.is_leaving or server.link.is_stalled or server.link.is_overfull:
                residency.detach()

    def _control(self, command: engine_messages.AdminCommand) -> None:
        """Carry out an admin command by the rollout side's code: what fails there removes the rollout model."""
        try:
            self._controls.obey(command)
        except RoseError:
            raise
        except Exception as error:
            self._residency.fail(error)
            raise RequestRefused(self._residency.failure, hint=RESTART) from error

    def _status(self) -> LendingStatus | None:
        """Return the status for a reply to serving; it is made by the rollout side's code, which may fail."""
        try:
            return self._controls.status()
        except Exception as error:
            if self._residency.failure:
                return None
            self._residency.fail(error)
            return self._status()

    def _guard(self, work: Callable[[], None]) -> None:
        """Do work for the rollout side; whatever it raises, serving goes on."""
        try:
            work()
        except Closed:
            self._guard(self._residency.detach)
        except Exception as error:
            self._residency.fail(error)
