"""The loop of a device that is lent: two engines, two ports, one step at a time, serving first.

Between two steps it takes the commands of both sides, then asks the lender whose step is next. What goes wrong on the
rollout side stays there: an exception in its engine or port, or a rollout front that is gone, removes the rollouts from
the device, with a word to whoever is still listening, and serving goes on. What goes wrong on the serving side is the
end of the process, as on any other device.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rose.core.admission import Admission, LendingLimits
from rose.core.breaches import Breach
from rose.core.breaker import Breaker
from rose.core.latency import LatencyModel
from rose.core.memory import MemoryPolicy
from rose.core.slo import Budgets
from rose.coserve import messages
from rose.coserve.lending import Lender, NextStep
from rose.coserve.link import Closed, EngineLink, wait_any
from rose.coserve.pages import PagePool
from rose.coserve.port import Port
from rose.coserve.profiling import profile
from rose.coserve.tenancy import SharedMemory
from rose.engines.base import Budget
from rose.engines.embedded.engine import MIB, EmbeddedEngine
from rose.engines.embedded.memory import block_bytes
from rose.models.folder import served_spec

ASK_AGAIN_S = 0.05  # rollouts that may not run now could a little later, without anybody saying so


class LentExecutor:
    """`run` returns when the serving front says so, and raises Closed without one."""

    def __init__(
        self,
        lender: Lender,
        serving: EngineLink,
        rollout: EngineLink,
        *,
        budget: Budget,
        now_s: Callable[[], float] = time.monotonic,
        memory: SharedMemory | None = None,
        on_breach: Callable[[Breach], None] = lambda breach: None,
    ) -> None:
        self._lender = lender
        self._memory = memory
        self._now_s = now_s
        self._on_breach = on_breach
        self._serving = Port(
            lender.serving, serving, budget, now_s=now_s, on_add=lender.serving_added, on_gone=lender.serving_gone
        )
        self._rollout: Port | None = Port(lender.rollout, rollout, budget, now_s=now_s, on_swap=self._swapped)
        if memory is not None:
            memory.stretch = lender.stretch
            memory.lend_to(lender.rollout.scheduler, self._rollout.send_evicted)

    def run(self) -> None:
        serving = self._serving
        while True:
            serving.obey_all()
            self._guarded(lambda rollout: rollout.obey_all())
            if serving.leaving:
                return
            if serving.link.congested or not self._step():
                self._sleep()

    # Stepping

    def _step(self) -> bool:
        if self._memory is not None and self._rollout is not None:
            self._memory.observe()
        step = self._guarded_choice()
        if step is None:
            return False
        if step.side == "serving":
            self._run(self._serving, step)
        else:
            self._guarded(lambda rollout: self._run(rollout, step))
        return True

    def _guarded_choice(self) -> NextStep | None:
        try:
            return self._lender.next_step(self._now_s())
        except Exception as error:
            if self._rollout is None:
                raise
            self._remove_rollouts(error)  # if it was serving's planning after all, the next one raises
            return self._lender.next_step(self._now_s())

    def _run(self, port: Port, step: NextStep) -> None:
        started = port.started_by(step.plan)
        begin_s = self._now_s()
        events = port.engine.step(step.plan)
        end_s = self._now_s()
        port.send_step(step.plan, events, end_s - begin_s, started)
        for breach in self._lender.finish(step, events, begin_s, end_s):
            self._on_breach(breach)

    def _sleep(self) -> None:
        ports = [self._serving] + ([self._rollout] if self._rollout is not None else [])
        for port in ports:
            port.tell_facts()
        has_rollouts = self._rollout is not None and self._lender.rollout.scheduler.has_work()
        wait_any([port.link for port in ports], ASK_AGAIN_S if has_rollouts else None)

    # The rollout side

    def _guarded(self, work: Callable[[Port], None]) -> None:
        """Do something for the rollouts; whatever it raises, serving does not notice."""
        if self._rollout is None:
            return
        try:
            work(self._rollout)
        except Exception as error:
            self._remove_rollouts(error)
            return
        if self._rollout.leaving:
            self._remove_rollouts(Closed())

    def _swapped(self) -> None:
        if self._memory is not None:
            self._memory.weights_swapped = True

    def _free_rollout_memory(self) -> None:
        """Its engine may be in any state, but its scheduler is ours: take every request out, then every page."""
        if self._memory is not None:
            self._lender.rollout.limit_kv(0)
            self._memory.remove_rollouts()

    def _remove_rollouts(self, error: Exception) -> None:
        port, self._rollout = self._rollout, None
        assert port is not None
        self._lender.stop("the rollout model is not on this device any more")
        self._free_rollout_memory()
        if isinstance(error, Closed):
            return
        traceback.print_exception(error)
        port.link.send(messages.Failed(messages.fault_of(error)))


def load_lent(
    start: messages.Start, lend: messages.Lend, serving_link: EngineLink, rollout_link: EngineLink
) -> LentExecutor:
    """Both models on one pool of pages, their step times learnt. Raises ModelError or ConfigError."""
    folders, settings = (Path(start.folder), Path(lend.folder)), (start.settings, lend.settings)
    sizes = [block_bytes(served_spec(folder)) for folder in folders]
    pages = start.settings.kv_memory_mb * MIB // lend.page_bytes
    memory = SharedMemory(
        PagePool(pages, lend.page_bytes),
        MemoryPolicy(pages),
        serving_block_bytes=sizes[0],
        rollout_block_bytes=sizes[1],
        now_s=time.monotonic,
    )
    engines, models = [], []
    for folder, own, tenant in zip(folders, settings, (memory.serving, memory.rollout), strict=True):
        engine = EmbeddedEngine.load(folder, own, device=start.device, memory=tenant.memory)
        serving_link.send(messages.Progress(f"learning how long steps of {folder.name} take"))
        model = LatencyModel()
        profile(engine, model, own.max_step_tokens)
        engines.append(engine)
        models.append(model)
    gc.collect()
    gc.freeze()
    limits = LendingLimits(
        serving_step_tokens=start.settings.max_step_tokens,
        rollout_step_tokens=lend.settings.max_step_tokens,
        serving_sequences=start.settings.max_sequences,
        rollout_sequences=lend.settings.max_sequences,
    )
    budgets = Budgets(lend.ttft_s, lend.tpot_s, lend.slack_share)
    admission = Admission(lend.mode, budgets, models[0], models[1], limits, Breaker())
    budget = Budget(start.settings.max_step_tokens, start.settings.max_sequences)
    lender = Lender(engines[0], engines[1], admission, serving_budget=budget)
    for link, engine in zip((serving_link, rollout_link), engines, strict=True):
        link.send(messages.Ready(engine.facts()))
    return LentExecutor(lender, serving_link, rollout_link, budget=budget, memory=memory)
