"""`rose run`: makes the folder and the models, starts the processes at their site, runs the job, and cleans up.

Whatever happens, and also on Ctrl-C, every process is ended, and what was measured so far becomes a report.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rose.client import GatewayClient
from rose.core.facts import RunResumed
from rose.device.supervision import settle
from rose.envs.environment_registry import make_environment
from rose.envs.openai_agent import AgentEndpoint
from rose.errors import RoseError, Unavailable
from rose.gateway.auth import registered_gateway
from rose.models.model_folder import load_model_folder
from rose.run import process_specs
from rose.run.cpu_affinity import CONTROL_NICENESS, TRAINER_NICENESS, Placement
from rose.run.job import Job
from rose.run.learning import Learner, TrainerThread, serving_model
from rose.run.lending_switch import LendingSwitch, Stall
from rose.run.monitor import PoolSample, PoolWatch
from rose.run.origin import origin_record
from rose.run.past_runs import Stopped, exit_record
from rose.run.process_site import ProcessEvents, Site, StartedProcess, site_of
from rose.run.process_specs import check_vllm, join_s_max, make_tokens, operators_entry, secrets_of_run
from rose.run.processes import Died
from rose.run.publishing import given_secret
from rose.run.resuming import ResumePoint, start_of
from rose.run.run_folder import RunFolder
from rose.run.run_progress import Screen
from rose.run.run_records import DeathRecord, RestRecord, SampleRecord
from rose.run.run_rollouts import AgentEpisodes, Rollouts
from rose.run.run_settings import RunSettings
from rose.run.serving_traffic import ServingLog
from rose.run.summary import sum_up
from rose.train.recipes import find_recipe
from rose.weights.weight_buffers import sweep

JOIN_S_MAX = 60.0
UPDATE_S_MAX = 60.0  # longest wait for the trainer's last update when a run is stopped
GATEWAY_PATIENCE_S = 600.0  # with a gateway that has no worker for the moment


async def run_locally(settings: RunSettings, screen: Screen, *, is_resumed: bool = False) -> Path:
    """Run to the end, and return the folder. Raises what ended the run early, after cleaning up."""
    check_start(settings)
    site = site_of(settings)
    try:
        return await _run_at(site, await site.open(), settings, screen, is_resumed=is_resumed)
    finally:
        await site.close()


async def _run_at(site: Site, placement: Placement, settings: RunSettings, screen: Screen, *, is_resumed: bool) -> Path:
    folder = RunFolder(settings, is_resumed=is_resumed)
    screen.say(f"run {folder.name}: {settings.steps} steps of {settings.environment}, in {folder.path}")
    start = ResumePoint()
    if is_resumed:
        start, notes = start_of(folder)
        for note in notes:
            screen.say(note)
        folder.record(start.record())
        folder.decided(RunResumed(start.step, start.next_group, start.outstanding), [])
    folder.record(origin_record())
    for note in placement.notes:
        screen.say(note)
    local = LocalRun(settings, site, placement, folder, start, screen)
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    work = asyncio.create_task(local.run())
    try:
        await _until_ended(work, local.processes.failed, stopped)
    except BaseException as error:
        with contextlib.suppress(RoseError):  # a disk that is full; the error says so already
            folder.record(exit_record(error))
        raise
    finally:
        await local.close()
        try:
            for line in sum_up(folder):
                screen.say(line)
        except (RoseError, OSError) as error:  # a full disk hides no earlier error
            screen.say(f"the report could not be written: {error}")
        finally:
            folder.close()
        if not work.done() or work.cancelled() or work.exception() is not None:
            screen.say(f"to go on with it: rose run --resume {folder.path}")
    return folder.path


class LocalRun:
    """The processes of one run and the job between them."""

    def __init__(
        self,
        settings: RunSettings,
        site: Site,
        placement: Placement,
        folder: RunFolder,
        start: ResumePoint,
        screen: Screen,
    ) -> None:
        self._settings, self._placement, self._folder, self._screen = settings, placement, folder, screen
        self._resume_point = start
        self._tokens = make_tokens()
        self._thread = TrainerThread(TRAINER_NICENESS, placement.others)
        self._learner = Learner(self._thread, settings, folder, start)
        secrets = secrets_of_run(self._tokens, self._learner.publishing.variables)
        events = ProcessEvents(self._on_death, self._on_moved, screen.say)
        self.processes = site.processes(folder.logs, secrets, events)
        self._serving = ServingLog(self._on_request)
        self._lending: LendingSwitch | None = None
        self._rollouts: Rollouts | None = None
        self._last: PoolSample | None = None
        self._device: StartedProcess
        self._stall = Stall()
        self._rest_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        await self.processes.prepare()
        # This process plays environments: it has a lower priority, and stays off serving's cores.
        os.nice(CONTROL_NICENESS)
        os.sched_setaffinity(0, self._placement.others)
        async with AsyncExitStack() as held:
            await held.enter_async_context(_meanwhile(self._show()))
            job = await self._start(held)
            await held.enter_async_context(_meanwhile(job.pool.watch()))
            serving = self._settings.serving
            if self._lending is not None and serving.owner_lends_s:
                switching = self._lending.switch_forever(serving.owner_lends_s, serving.owner_keeps_s)
                await held.enter_async_context(_meanwhile(switching))
            await job.run()
            await self._learner.finish()

    async def close(self) -> None:
        self._screen.live.phase = "stopping"
        await self.processes.close()
        await asyncio.to_thread(sweep)  # copies of the weights that killed devices left in memory
        await asyncio.wait([asyncio.create_task(self._learner.close())], timeout=UPDATE_S_MAX)

    async def _start(self, held: AsyncExitStack) -> Job:
        """Start models, then the gateway, then the devices and the trainer at once, then the users."""
        settings, placement, screen = self._settings, self._placement, self._screen
        screen.live.phase = "making models"
        serving = serving_model(settings.serving.preset, Path(settings.runs))
        screen.say("preparing the rollout model (a warm start takes up to a minute, once; it is kept in the cache) ...")
        rollout = await self._learner.prepare()
        await self.processes.share_weights(self._learner.publishing)
        model = load_model_folder(rollout)
        screen.live.phase = "starting devices"
        worker = f"a dedicated worker on {placement.worker}" if placement.worker else "no dedicated worker"
        screen.say(f"starting gateway and devices: serving on {placement.serving}, {worker} ...")
        gateway = process_specs.gateway(rollout, settings, placement, self._folder.ledger)
        gateway_url = (await self.processes.start(gateway)).captured["url"]
        held.enter_context(registered_gateway(operators_entry(gateway_url, self._tokens)))
        screen.say(f"live page: {gateway_url}/ui (its token: rose pool token --gateway {gateway_url})")
        client = await held.enter_async_context(
            GatewayClient(gateway_url, self._tokens.trainer, patience_s=GATEWAY_PATIENCE_S)
        )
        starts: list[Coroutine[Any, Any, Any]] = [self._learner.load()]
        if placement.worker is not None:
            starts.append(self.processes.start(process_specs.dedicated(rollout, settings, placement, gateway_url)))
        secret = self._learner.publishing.secret
        ranks = process_specs.trainer_ranks(settings, placement, self._learner.meeting, secret)
        starts += [self.processes.start(command) for command in ranks]
        serving_starts = self._start_borrowed(serving, rollout, gateway_url)
        (serving_url, admin_url), *_ = await asyncio.gather(serving_starts, *starts)
        pool = PoolWatch(client, self._on_sample, self._folder.record, self._screen.say)
        endpoint = AgentEndpoint(gateway_url, self._tokens.agent, model.name)
        agents = AgentEpisodes(settings, endpoint) if settings.agent is not None else None
        rollouts = Rollouts(
            client, model, settings, self._folder.name, self._folder.decided, agents, self._resume_point.balance
        )
        if settings.serving.is_borrowed:
            self._lending = LendingSwitch(admin_url, self._tokens.owner, self._folder.record)
        job = Job(
            settings, self._folder, client, self._learner, rollouts, pool, self._lending, self._serving, screen,
            self._costs, self._resume_point,
        )  # fmt: skip
        await self._assemble(job)
        await self.processes.start(process_specs.traffic(settings, placement, serving_url), self._serving.add)
        screen.say("ready: users are served, rollouts begin")
        self._rollouts = rollouts
        return job

    async def _start_borrowed(self, serving: Path, rollout: Path, gateway_url: str) -> tuple[str, str]:
        """Return the serving device's address for its users, and that of its admin controls."""
        settings, placement = self._settings, self._placement
        command = process_specs.borrowed(serving, rollout, settings, placement, gateway_url)
        self._device = device = await self.processes.start(command)
        url = device.captured["url"]
        lender = process_specs.lender(rollout, settings, placement, gateway_url, url)
        return url, (await self.processes.start(lender)).captured["url"] if lender is not None else url

    async def _assemble(self, job: Job) -> None:
        """Wait until every worker has joined and runs what the trainer begins with."""
        wanted = int(self._settings.serving.is_borrowed) + int(self._placement.worker is not None)
        deadline_s = time.monotonic() + join_s_max(self._settings, JOIN_S_MAX)
        while len((await job.client.pool())["members"]) < wanted:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"not all of {wanted} workers joined the gateway", hint=f"see {self._folder.logs}")
            await asyncio.sleep(0.1)
        await job.versions.publish(self._learner.published)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(self._screen.every_s)
            live = self._screen.live
            live.attainment = self._serving.attainment()
            if self._rollouts is not None:
                live.under_way, live.ended = self._rollouts.under_way, self._rollouts.ended
            self._screen.show()

    def _on_death(self, died: Died) -> None:
        what = "it is started again" if died.is_restarted else "the run ends"
        self._screen.say(f"{died.role} died (code {died.code}); {what}")
        with contextlib.suppress(RoseError):
            self._folder.record(
                DeathRecord(at_s=time.monotonic(), role=died.role, code=died.code, is_restarted=died.is_restarted)
            )
        if died.role == process_specs.owner_role(self._settings) and self._lending is not None:
            self._lending.restarted()

    def _on_moved(self, role: str) -> None:
        """Send admin commands to the serving device's new address, if that is what has moved."""
        if role == process_specs.BORROWED and self._lending is not None:
            self._lending.move(self._device.captured["url"])

    def _on_request(self, line: bytes) -> None:
        try:
            self._folder.served(line)
        except Unavailable as error:
            settle(self.processes.failed, error)

    def _on_sample(self, sample: PoolSample) -> None:
        stalls = self._stall.observe(
            sample.turns[process_specs.BORROWED], sample.running[process_specs.BORROWED], sample.at_s
        )
        if stalls and self._placement.worker is not None and (self._rest_task is None or self._rest_task.done()):
            self._rest_task = asyncio.create_task(self._rest())
        if self._last is not None and (took_s := sample.at_s - self._last.at_s) > 0:
            live = self._screen.live
            live.dedicated_turns_per_s, live.borrowed_turns_per_s = (
                (sample.turns[kind] - self._last.turns[kind]) / took_s for kind in ("dedicated", "borrowed")
            )
        self._last = sample
        with contextlib.suppress(Unavailable):  # the next step's line says so too, and ends the run
            at_s = round(sample.at_s, 3)
            self._folder.record(
                SampleRecord(at_s=at_s, turns=sample.turns, running=sample.running, version=sample.version)
            )

    async def _rest(self) -> None:
        assert self._lending is not None
        with contextlib.suppress(RoseError):
            why = await self._lending.rest()
            self._screen.say(f"the borrowed device stopped lending ({why}): it rests, its turns go on elsewhere")
            self._folder.record(RestRecord(at_s=time.monotonic(), why=why))

    def _costs(self) -> dict[str, float]:
        """Return the processor time by role. This process plays the environments; the trainer has a thread."""
        found = self.processes.cpu_s()
        own_s, rank_0_s = time.process_time(), self._thread.cpu_s
        trainer_s = rank_0_s + sum(found.pop(role) for role in list(found) if role.startswith(process_specs.RANK))
        return found | {"trainer": trainer_s, "environments": max(0.0, own_s - rank_0_s)}


@contextlib.asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until_ended(work: asyncio.Task[None], failed: asyncio.Future[Unavailable], stopped: asyncio.Event) -> None:
    """Await the work. Raises Stopped if the user ends it first, or the error of a process that failed first."""
    stop = asyncio.create_task(stopped.wait())
    try:
        ends: list[asyncio.Future[Any]] = [work, failed, stop]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if failed.done():
                raise failed.result()
            if stopped.is_set():
                raise Stopped
        await work
    finally:
        stop.cancel()


def check_start(settings: RunSettings) -> None:
    """Check what would fail later: a run that is sure to fail makes no folder and starts no device.

    Raises ConfigError or ModelError for a missing extra, model or secret of the relay.
    """
    make_environment(settings.environment, **settings.environment_options).close()
    check_vllm(settings)
    given_secret(settings.weights)
    if settings.rollout_model is not None:
        load_model_folder(settings.rollout_model)
    else:
        find_recipe(settings.environment)
