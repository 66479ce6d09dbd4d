"""Keep a rollout engine running beside a `vllm serve` that is not ours, and keep its grant renewed.

`VllmEngineClient` is the engine client of the gateway's agent (rose.worker.agent). Every half second it looks for the
status segment of a living process and writes a grant that holds for two seconds: all that the engine has, or nothing
with the reason. So rollout steps stop by themselves whatever happens to this process; within the grant the engine
decides step by step. A dead engine is restarted with its weights; one whose weights are uncertain is ended first. When
serving restarts, its new segment is found and its step times are learnt again. Without a serving engine this is a
dedicated rollout worker.

The gateway may park the engine while there is no work: steps stop, its turns are handed back and its KV memory returns
to the machine. The weights stay. KV memory here is the rollout engine's alone, so there are no pages of serving.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import logging
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rose.core.accountant import KINDS
from rose.core.admission import Mode
from rose.core.history import ServingTimes
from rose.core.lending_state import ActualLending, DesiredLending, Reconciled, reconcile
from rose.core.slo import Budgets
from rose.core.stalls import StallDetector
from rose.device.channel_client import EngineCounters
from rose.device.residency import UNWANTED
from rose.engines.base import DryRunStatus, EngineEvents, EngineFacts, LendingStatus, Request, Stepped
from rose.engines.process_keeper import RestartCounter, RestartPolicy
from rose.engines.token_stream import TokenSink
from rose.errors import ConfigError, ModelError, QueueFull, RequestRefused, RoseError, Unavailable
from rose.vllm.control_segment import Status, Terms
from rose.vllm.discovery import find_segment, is_live, own_folder, port_of
from rose.vllm.engine_process import EngineProcess, RolloutEngineSettings
from rose.vllm.lending_counters import LendingCounters
from rose.vllm.pool_membership import KvChoice, PoolMembership
from rose.vllm.vllm_engine import VllmEngine, engine_facts
from rose.worker.heartbeats import STATUS_S_MAX

logger = logging.getLogger("rose.agent")

RENEW_S, LEASE_S = 0.5, 2.0
HANG_S = 30.0  # an engine that has not taken a grant for this long hangs
RESTARTS = RestartPolicy(pause_first_s=2.0, pause_longest_s=30.0, healthy_s=60.0, deaths_max=3)
WAITING_MAX = 256
ALL = 1 << 20  # tokens and sequences: as many as the engine has


@dataclass(frozen=True, slots=True)
class VllmLending:
    """What is lent, beside which server, on what terms. Without `serving_url` it is a dedicated worker."""

    engine: RolloutEngineSettings
    serving_url: str = ""
    mode: Mode = "idle"
    budgets: Budgets = field(default_factory=lambda: Budgets(0.5, 0.15, answer_s=60.0))
    compute_share: float = 1.0  # of the device's time, until the operator limits it
    kv: KvChoice = "auto"  # memory from serving's pool, of the engine's own, or from the pool if there is one
    replica: int | None = None  # which engine of a server with data parallelism

    def terms(self, segment: Path) -> Terms:
        return Terms(str(segment), self.mode, **dataclasses.asdict(self.budgets))


class VllmEngineClient:
    """The engine client of one rollout engine on vLLM, which it keeps running. `start` returns when it is up."""

    def __init__(self, lending: VllmLending) -> None:
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        self.events = EngineEvents()
        self.lending = lending
        self.desired = DesiredLending(compute_share=lending.compute_share)  # kept over restarts
        self.restarts = 0
        self._activation_s: float | None = None
        self._parking_s: float | None = None
        self._lending_counters = LendingCounters()
        self._locks = _lock_devices(lending)
        self._pool = PoolMembership(lending.kv)
        self._kv_bytes = lending.engine.kv_memory_mb << 20
        self._process: EngineProcess | None = None
        self._engine: VllmEngine | None = None
        self._reason = Unavailable("the rollout engine is starting")
        self._segment: Path | None = None
        self._no_segment = ""
        self._staged: tuple[str, str] | None = None  # version and folder
        self._weights: tuple[str, str] | None = None  # what a new engine must begin with
        self._counters = EngineCounters()
        self._counters.on_start(engine_facts(Status(0)))
        self._stalls, self._steps_seen, self._watched_s = StallDetector(), 0, 0.0
        self._turns: dict[str, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._is_closing = False

    async def start(self) -> None:
        """Start the engine. Raises what is wrong with the serving engine or the rollout engine."""
        if self.lending.serving_url:
            self._segment = find_segment(self.lending.serving_url, self.lending.replica)
        await self._start_engine()
        self._keeper = asyncio.create_task(self._keep())
        self._keeper.add_done_callback(self._on_keeper_ended)

    async def close(self) -> None:
        """End every turn with Unavailable, then the engine."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._reason = Unavailable("the device is shutting down")
        self._engine, self._is_closing = None, True
        turns = list(self._turns.values())
        self.cancel(list(self._turns))
        await asyncio.gather(*turns, return_exceptions=True)
        if self._process is not None:
            await self._process.close()
        self._locks.close()

    # Status

    @property
    def facts(self) -> EngineFacts:
        status = self.status
        return self._counters.total(engine_facts(status) if status is not None else None)

    @property
    def status(self) -> Status | None:
        """Return the engine's status, if there is an engine."""
        with suppress(Unavailable):
            return self._engine.status() if self._engine is not None else None
        return None

    @property
    def trouble(self) -> Unavailable | None:
        """Return why nothing is lent for longer than a turn should wait here."""
        if self._engine is None:
            return self._reason
        why, status = self._why_stopped(), self.status
        if not why and self.lending.serving_url and status is not None:
            missing = status.lent.missing
            why = status.lent.resting or (f"learning how long serving's steps take: {missing}" if missing else "")
        return Unavailable(why) if why else None

    def _why_stopped(self) -> str:
        """Return why no rollout may run here: by the operator, without a serving engine, or without work."""
        if self.desired.stop is not None:
            return self.desired.stop.text
        return self._no_segment or ("" if self.desired.is_wanted else UNWANTED)

    @property
    def shut_s(self) -> float | None:
        """Return for how long admission has been blocked, as of the last report by `on_lending`."""
        return self._stalls.blocked_s(self._watched_s)

    @property
    def lending_status(self) -> LendingStatus | None:
        """Return how the device is lent; None for a dedicated worker."""
        return self.admin_status() if self.lending.serving_url else None

    def admin_status(self) -> LendingStatus:
        """Return the status of lending for the operator, also of a dedicated worker."""
        engine, trouble, desired = self._lending_counters.total(self.status or Status(0)), self.trouble, self.desired
        lent = engine.lent
        dry = DryRunStatus(lent.dry_run_s, lent.dry_run_tokens, lent.dry_run_lent_s) if desired.is_dry_run else None
        return LendingStatus(
            state=self._reconciled().state,
            why=trouble.what if trouble is not None else engine.why,
            mode=self.lending.mode,
            model="resident" if engine.kv_blocks_limit else "parked",
            model_bytes=0,
            activation_s=self._activation_s,
            parking_s=self._parking_s,
            running=engine.running,
            waiting=engine.waiting,
            lent_steps=lent.steps,
            lent_tokens=lent.tokens,
            lent_s=lent.seconds,
            evictions=engine.evictions,
            evicted_tokens=engine.evicted_tokens,
            breaches={kind: lent.breaches.get(kind, 0) for kind in KINDS},
            breaker_trips=lent.breaker_trips,
            lending_stretch=1.0,
            **self._page_figures(engine),
            memory_share=desired.memory_share,
            compute_share=desired.compute_share,
            dry_run=dry,
            serving=ServingTimes(int(lent.serving[0]), *lent.serving[1:]) if lent.serving else None,
            is_resting=bool(lent.resting),
            shut_s=self.shut_s,
            ttft_budget_s=self.lending.budgets.ttft_s,
            tpot_budget_s=self.lending.budgets.tpot_s,
        )

    def _page_figures(self, engine: Status) -> dict[str, Any]:
        """Return the fields of the status about memory: pages of serving's pool, or blocks of the engine's own."""
        pool = self._pool
        is_shared = pool.segment is not None
        unit = pool.page_bytes if is_shared else engine.block_bytes
        return {
            "page_bytes": unit,
            "pages": pool.pages if is_shared else self._kv_bytes // max(1, unit),
            "rollout_pages": engine.pages if is_shared else engine.kv_blocks_used + engine.kv_blocks_cached,
            "rollout_pages_max": engine.pages_max if is_shared else engine.kv_blocks_limit,
            "serving_pages": pool.serving_pages if is_shared else 0,
            "headroom_pages": engine.headroom_pages,
            "memory_state": engine.memory_state,
        }

    def _reconciled(self) -> Reconciled:
        failure = self.gave_up.result().what if self.gave_up.done() else ""
        return reconcile(self.desired, ActualLending(has_engine=self.status is not None, failure=failure))

    # Turns

    def submit(self, requests: Sequence[Request], sink: TokenSink) -> None:
        """Run requests. Raises Unavailable, QueueFull or RequestRefused before any begins."""
        engine = self._checked()
        room = self.lending.engine.max_sequences + WAITING_MAX - len(self._turns)
        if len(requests) > room:
            raise QueueFull(f"{len(self._turns)} rollouts are running or waiting", hint="retry a little later")
        for request in requests:
            if request.request_id in self._turns:
                raise RequestRefused(f"request `{request.request_id}` is already here")
        for request in requests:
            self._turns[request.request_id] = asyncio.create_task(self._run(engine, request, sink))

    async def _run(self, engine: VllmEngine, request: Request, sink: TokenSink) -> None:
        try:
            async for event in engine.generate(request):
                sink.put(event)
                if event.finish_reason is not None:
                    self._turns.pop(request.request_id, None)
                self.events.steps.publish(Stepped((event,), self.facts))
                if event.finish_reason is None and sink.is_full:
                    raise Unavailable("the reader of this request is too slow")
        except RoseError as error:
            sink.fail(error)
        except asyncio.CancelledError:
            if self._is_closing:
                sink.fail(self._reason)
            raise
        finally:
            if self._turns.get(request.request_id) is asyncio.current_task():
                del self._turns[request.request_id]

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            task = self._turns.pop(request_id, None)
            if task is not None:
                task.cancel()

    async def evict(self, request_id: str) -> None:
        """End a request with "abort" and everything produced."""
        await self._checked().evict(request_id)

    async def query(self) -> EngineFacts:
        """Return the facts. Raises Unavailable without an engine."""
        self._checked()
        return self.facts

    def _checked(self) -> VllmEngine:
        if self._engine is None:
            raise Unavailable(self._reason.what, hint="retry a little later")
        return self._engine

    # Weights

    async def stage(self, version: str, folder: str) -> None:
        """Read and compare weights from a folder beside the running ones."""
        await self._checked().stage(version, folder)
        self._staged = version, folder

    async def commit(self, version: str) -> None:
        """Swap to the staged version; an engine whose weights are unknown afterwards is ended."""
        try:
            await self._checked().commit(version)
        except Unavailable:
            if self._process is not None:  # mixed weights, or gone: in both cases another engine is started
                logger.error("version `%s` failed half-way: the rollout engine is ended and restarted", version)
                self._process.kill()
            raise
        self._weights = self._staged

    # Desired state

    async def adopt(self, desired: DesiredLending) -> None:
        """Take over a desired state, and wait until the engine applies it if there is one."""
        self.desired = desired
        if self._engine is not None:
            await self._engine.apply_control(**self._control())

    async def set_wanted(self, is_wanted: bool) -> None:
        """Load the model, or park it until there is work. What the operator stopped stays stopped."""
        if is_wanted != self.desired.is_wanted:
            began_s, has_engine = time.monotonic(), self._engine is not None
            await self.adopt(dataclasses.replace(self.desired, is_wanted=is_wanted))
            if has_engine:
                seconds = time.monotonic() - began_s
                if is_wanted:
                    self._activation_s = seconds
                else:
                    self._parking_s = seconds
                self.events.lending.publish(self.lending_status)
        self._checked()

    def _control(self) -> dict[str, object]:
        desired, why = self.desired, self._why_stopped()
        kv_bytes: int | None = 0
        if self._reconciled().residency == "resident":
            share = desired.memory_share
            kv_bytes = int(share * self._kv_bytes) if share < 1 else None
        return {
            "tokens": 0 if why else ALL,
            "sequences": 0 if why else ALL,
            "until_s": time.monotonic() + LEASE_S,
            "terms": self.lending.terms(self._segment) if self._segment is not None else None,
            "stopped": why,
            "compute_share": desired.compute_share,
            "dry_run": desired.is_dry_run,
            "resumes": desired.resumes,
            "kv_bytes": kv_bytes,
        }

    # Keeping it running

    def _new_process(self, engine: RolloutEngineSettings) -> EngineProcess:
        return EngineProcess(engine)

    async def _start_engine(self) -> None:
        """Start an engine with the weights of the one before, or its own, until the gateway sends them again.

        Raises RoseError, also if the machine has no room for its process or folder.
        """
        try:
            settings = self._pool.settings(self.lending.engine, self._segment)
            self._kv_bytes = settings.kv_memory_mb << 20
            process = self._new_process(settings)
            try:
                engine = await process.start()
                if self._weights is not None:
                    version, folder = self._weights
                    try:
                        await engine.stage(version, folder)
                        await engine.commit(version)
                    except ModelError as error:
                        logger.warning("version `%s` cannot be given to the new engine: %s", version, error.what)
                        self._weights = None
            except BaseException:
                await process.close()
                raise
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"the rollout engine cannot be started: {error}") from error
        self._process, self._engine = process, engine
        self._counters.on_start(engine_facts(engine.status()))
        self._renew_grant()

    async def _keep(self) -> None:
        restarts, born_s = RestartCounter(RESTARTS), time.monotonic()
        while True:
            await asyncio.sleep(RENEW_S)
            if self._is_healthy():
                self._renew_grant()
                if self._process is not None:
                    self._process.cut_log()
                continue
            if self._pool.is_lost(self._segment):
                await self._follow_serving()
                continue
            pause_s = restarts.pause_after(time.monotonic() - born_s)
            await self._discard_engine()
            if pause_s is None:
                self.gave_up.set_result(
                    Unavailable(f"the rollout engine died {restarts.deaths} times in a row: {self._reason.what}")
                )
                return
            await asyncio.sleep(pause_s)
            try:
                await self._start_engine()
                self.restarts += 1
                logger.warning("the rollout engine is running again")
            except RoseError as error:
                logger.error("the rollout engine cannot be restarted: %s", error.what)
                self._reason = Unavailable(error.what)
            born_s = time.monotonic()

    async def _follow_serving(self) -> None:
        """End an engine whose pool ended with its serving engine, and start another one beside the next."""
        await self._discard_engine()
        self._reason = Unavailable("the serving engine is gone, and with it the KV pool of the rollout engine")
        self._update_segment()
        if self._segment is None:
            return
        try:
            await self._start_engine()
            self.restarts += 1
        except RoseError as error:
            logger.error("the rollout engine cannot join the new serving engine's pool: %s", error.what)
            self._reason = Unavailable(error.what)

    def _on_keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """Report that the keeper has ended: without it no grant is renewed."""
        if keeper.cancelled() or self.gave_up.done():
            return
        error = keeper.exception()
        logger.error("the rollout engine is no longer kept", exc_info=error)
        self.gave_up.set_result(Unavailable(f"the rollout engine is no longer kept: {error!r}"))

    def _is_healthy(self) -> bool:
        if self._process is None or self._engine is None or not self._process.is_running:
            return False
        if self._pool.is_lost(self._segment):
            return False
        if self._pool.segment is not None and self._pool.is_blocking(self.status, time.monotonic()):
            logger.error("the rollout engine shows no life and keeps pages that serving asks for: it is ended")
            return False
        with suppress(Unavailable):  # it has just died
            return self._engine.unapplied_s < HANG_S
        return False

    async def _discard_engine(self) -> None:
        if self._process is None:
            return
        self._reason = Unavailable(f"the rollout engine is gone; the end of its log:\n{self._process.log_tail()}")
        logger.error("%s", self._reason.what)
        self._counters.on_gone(self.facts)
        process, self._process, self._engine = self._process, None, None
        process.kill()
        await process.close()

    def _renew_grant(self) -> None:
        """Renew the grant if there is a serving engine, and report it. The engine runs on, whatever fails."""
        try:
            self._update_segment()
            if self._engine is not None:
                with suppress(Unavailable):
                    self._engine.write_control(**self._control())
            self._lending_counters.total(self.status or Status(0))
            self._watch_admission(time.monotonic())
            self.events.lending.publish(self.lending_status)
        except Exception:
            logger.exception("a grant was not renewed, or not reported")

    def _update_segment(self) -> None:
        """Find the serving engine's segment again if its process has ended."""
        if not self.lending.serving_url or (self._segment is not None and is_live(self._segment)):
            return
        before = self._no_segment
        try:
            self._segment, self._no_segment = find_segment(self.lending.serving_url, self.lending.replica), ""
        except RoseError as error:
            self._segment, self._no_segment = None, error.what
        if self._no_segment != before:
            logger.warning("%s", self._no_segment or "the serving engine publishes its status again")

    def _watch_admission(self, now_s: float) -> None:
        """Note whether serving blocks the engine. One that publishes nothing for seconds hangs, and is not blocked."""
        self._watched_s, status = now_s, self.status
        is_stopped = self.trouble is not None or self.desired.is_dry_run
        if status is None or is_stopped or now_s - status.at_s > STATUS_S_MAX:
            self._stalls.forget()
            return
        has_turns = bool(status.running or status.waiting)
        is_open = status.gate_open and (now_s < status.until_s or not has_turns)
        is_admitted = is_open or status.steps != self._steps_seen
        self._steps_seen = status.steps
        if has_turns or is_admitted:
            self._stalls.on_request(now_s, is_admitted=is_admitted)
        else:
            self._stalls.on_idle(now_s)


def _lock_devices(lending: VllmLending) -> ExitStack:
    """Lock server, cores and GPU: two agents would lend the same slack. Raises ConfigError."""
    names = {part: part.replace(":", "-") for part in lending.engine.parts}
    if lending.serving_url:
        replica = "" if lending.replica is None else f"-{lending.replica}"
        names[lending.serving_url] = f"{port_of(lending.serving_url)}{replica}"
    with ExitStack() as locks:
        for what, name in names.items():
            descriptor = os.open(own_folder() / f"{name}.lent", os.O_RDWR | os.O_CREAT, 0o600)
            locks.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                hint = "stop it first: one agent per device"
                raise ConfigError(f"another agent lends {what} already", hint=hint) from error
        return locks.pop_all()
