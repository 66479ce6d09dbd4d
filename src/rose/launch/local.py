"""`rose run` on this machine: makes the folder and the models, raises the curtain, runs the job, and cleans up.

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

from rose.core.facts import RunResumed
from rose.coserve.device import USABLE
from rose.envs.openai_agent import Door
from rose.errors import RoseError, Unavailable
from rose.launch import cast
from rose.launch.agent_episodes import agent_episodes
from rose.launch.aside import Aside
from rose.launch.asynchronous import AsynchronousJob
from rose.launch.checking import check_start
from rose.launch.ending import ENDED, Stopped, last_word
from rose.launch.folder import RunFolder
from rose.launch.job import Job, beside
from rose.launch.learning import Learner, serving_model
from rose.launch.lending import Lending, Stall
from rose.launch.placement import CONTROL_NICENESS, TRAINER_NICENESS, Placement, place
from rose.launch.processes import Died, Processes
from rose.launch.progress import Screen
from rose.launch.resuming import start_of
from rose.launch.role_secrets import make_tokens, secrets_of_run
from rose.launch.rollouts import Rollouts
from rose.launch.serving import ServingLog
from rose.launch.settings import RunSettings
from rose.launch.start import Start
from rose.launch.summing_up import sum_up
from rose.launch.vllm_cast import join_s_max
from rose.launch.watching import PoolSample, PoolWatch, ProcessorTime
from rose.models.folder import load_model_folder
from rose.rollout.client import GatewayClient
from rose.weights.slots import sweep

JOIN_S_MAX = 60.0
UPDATE_S_MAX = 60.0  # longest wait for the trainer's last update when a run is stopped
PATIENCE_S = 600.0  # with a gateway that has no worker for the moment


async def run_locally(settings: RunSettings, screen: Screen, *, is_resumed: bool = False) -> Path:
    """The whole run; its folder. Raises what ended it early, after cleaning up."""
    placement = place(settings, sorted(USABLE))
    check_start(settings)
    folder = RunFolder(settings, is_resumed=is_resumed)
    screen.say(f"run {folder.name}: {settings.steps} steps of {settings.environment}, in {folder.path}")
    start = _go_on(folder, screen) if is_resumed else Start()
    for words in placement.words:
        screen.say(words)
    stage = _Stage(settings, placement, folder, start, screen)
    stopped = _signalled()
    work = asyncio.create_task(stage.play())
    try:
        await beside(work, stage.processes.failed, stopped)
    except BaseException as error:
        with contextlib.suppress(RoseError):  # a disk that is full; the error says so already
            folder.record(ENDED, at_s=time.monotonic(), **last_word(error))
        raise
    finally:
        await stage.close()
        _finish(folder, screen)
        if not work.done() or work.cancelled() or work.exception() is not None:
            screen.say(f"to go on with it: rose run --resume {folder.path}")
    return folder.path


def _go_on(folder: RunFolder, screen: Screen) -> Start:
    start, words = start_of(folder)
    for line in words:
        screen.say(line)
    folder.record("resume", at_s=time.monotonic(), **start.shown())
    folder.decided(RunResumed(start.step, start.next_group, start.outstanding), [])
    return start


def _finish(folder: RunFolder, screen: Screen) -> None:
    """The report of what there is; a disk that is full is told and hides no earlier trouble."""
    try:
        for words in sum_up(folder):
            screen.say(words)
    except (RoseError, OSError) as error:
        screen.say(f"the report could not be written: {error}")
    finally:
        folder.close()


def _signalled() -> asyncio.Future[Stopped]:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[Stopped] = loop.create_future()

    def arrived() -> None:
        if not stopped.done():
            stopped.set_result(Stopped())

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, arrived)
    return stopped


class _Stage:
    """The processes of one run and the job between them."""

    def __init__(
        self, settings: RunSettings, placement: Placement, folder: RunFolder, start: Start, screen: Screen
    ) -> None:
        self._settings, self._placement, self._folder, self._screen = settings, placement, folder, screen
        self._start = start
        self._tokens = make_tokens()
        self._aside = Aside("trainer", TRAINER_NICENESS, placement.others)
        self._learner = Learner(self._aside, settings, folder, start)
        secrets = secrets_of_run(self._tokens, self._learner.publishing.variables)
        self.processes = Processes(folder.logs, secrets, self._died)
        self._serving = ServingLog(self._served)
        self._processor_time = ProcessorTime()
        self._lending: Lending | None = None
        self._last: PoolSample | None = None
        self._stall = Stall()
        self._resting: asyncio.Task[None] | None = None

    async def play(self) -> None:
        await self.processes.prepare()
        _stand_back(self._placement)
        async with AsyncExitStack() as held:
            await held.enter_async_context(_meanwhile(self._show()))
            job = await self._raise_curtain(held)
            await held.enter_async_context(_meanwhile(job.pool.watch()))
            serving = self._settings.serving
            if self._lending is not None and serving.owner_lends_s:
                restless = self._lending.come_and_go(serving.owner_lends_s, serving.owner_keeps_s)
                await held.enter_async_context(_meanwhile(restless))
            await job.run()

    async def close(self) -> None:
        self._screen.live.phase = "stopping"
        await self.processes.close()
        await asyncio.to_thread(sweep)  # copies of the weights that killed devices left in memory
        await asyncio.wait([asyncio.create_task(self._learner.close())], timeout=UPDATE_S_MAX)

    async def _raise_curtain(self, held: AsyncExitStack) -> Job:
        """Models, then the gateway, then the devices and the trainer at once, then the users."""
        settings, placement, screen = self._settings, self._placement, self._screen
        screen.live.phase = "making models"
        serving = serving_model(settings.serving.preset, Path(settings.runs))
        screen.say("preparing the rollout model (a warm start takes up to a minute, once; it is kept in the cache) ...")
        rollout = await self._learner.prepare()
        model = load_model_folder(rollout)
        screen.live.phase = "starting devices"
        screen.say(f"starting gateway and devices: serving on {placement.serving}, {_worker_words(placement)} ...")
        gateway = cast.gateway(rollout, settings, placement, self._folder.ledger)
        gateway_url = (await self.processes.start(gateway)).words["url"]
        client = await held.enter_async_context(GatewayClient(gateway_url, self._tokens.trainer, patience_s=PATIENCE_S))
        serving_url, owner_url = await self._start_devices(serving, rollout, gateway_url)
        pool = PoolWatch(client, self._sampled, self._folder.record, self._screen.say)
        agents = agent_episodes(settings, Door(gateway_url, self._tokens.agent, model.name))
        rollouts = Rollouts(client, model, settings, self._folder.name, self._folder.decided, agents)
        rollouts.go_on(self._start.next_group, self._start.balance)
        if settings.serving.is_borrowed:
            self._lending = Lending(owner_url, self._tokens.owner, self._folder.record)
        kind = AsynchronousJob if settings.asynchrony.is_used else Job
        job = kind(
            settings, self._folder, client, self._learner, rollouts, pool, self._lending, self._serving, screen,
            self._costs, self._start,
        )  # fmt: skip
        await self._assemble(job)
        await self.processes.start(cast.traffic(settings, placement, serving_url), self._serving.heard)
        screen.say("ready: users are served, rollouts begin")
        self._job = job
        return job

    async def _start_devices(self, serving: Path, rollout: Path, gateway_url: str) -> tuple[str, str]:
        """The serving device's address for its users, and for its owner."""
        settings, placement = self._settings, self._placement
        starts: list[Coroutine[Any, Any, Any]] = [self._learner.load()]
        if placement.worker is not None:
            starts.append(self.processes.start(cast.dedicated(rollout, settings, placement, gateway_url)))
        urls, *_ = await asyncio.gather(self._start_borrowed(serving, rollout, gateway_url), *starts)
        return urls

    async def _start_borrowed(self, serving: Path, rollout: Path, gateway_url: str) -> tuple[str, str]:
        settings, placement = self._settings, self._placement
        device = await self.processes.start(cast.borrowed(serving, rollout, settings, placement, gateway_url))
        url = device.words["url"]
        lender = cast.lender(rollout, settings, placement, gateway_url, url)
        return url, (await self.processes.start(lender)).words["url"] if lender is not None else url

    async def _assemble(self, job: Job) -> None:
        """Every worker has joined and runs what the trainer begins with."""
        wanted = int(self._settings.serving.is_borrowed) + int(self._placement.worker is not None)
        deadline_s = time.monotonic() + join_s_max(self._settings, JOIN_S_MAX)
        while len((await job.client.pool())["members"]) < wanted:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"not all of {wanted} workers joined the gateway", hint=f"see {self._folder.logs}")
            await asyncio.sleep(0.1)
        await job.publish(self._learner.published)

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(self._screen.every_s)
            live, job = self._screen.live, getattr(self, "_job", None)
            live.attainment = self._serving.attainment()
            if job is not None:
                live.under_way, live.ended = job.rollouts.under_way, job.rollouts.ended
            self._screen.show()

    # What is heard

    def _died(self, died: Died) -> None:
        what = "it is started again" if died.is_restarted else "the run ends"
        self._screen.say(f"{died.role} died (code {died.code}); {what}")
        with contextlib.suppress(RoseError):
            self._folder.record("death", at_s=time.monotonic(), role=died.role, code=died.code,
                                is_restarted=died.is_restarted)  # fmt: skip
        if died.role == cast.owner_role(self._settings) and self._lending is not None:
            self._lending.restarted()

    def _served(self, line: bytes) -> None:
        try:
            self._folder.served(line)
        except Unavailable as error:
            if not self.processes.failed.done():
                self.processes.failed.set_result(error)

    def _sampled(self, sample: PoolSample) -> None:
        stalls = self._stall.observe(sample.turns[cast.BORROWED], sample.running[cast.BORROWED], sample.at_s)
        if stalls and self._placement.worker is not None and (self._resting is None or self._resting.done()):
            self._resting = asyncio.create_task(self._rest())
        if self._last is not None and (took_s := sample.at_s - self._last.at_s) > 0:
            live = self._screen.live
            live.dedicated_turns_per_s, live.borrowed_turns_per_s = (
                (sample.turns[kind] - self._last.turns[kind]) / took_s for kind in ("dedicated", "borrowed")
            )
        self._last = sample
        with contextlib.suppress(Unavailable):  # the next step's line says so too, and ends the run
            self._folder.record("sample", at_s=round(sample.at_s, 3), turns=sample.turns, running=sample.running,
                                version=sample.version)  # fmt: skip

    async def _rest(self) -> None:
        assert self._lending is not None
        with contextlib.suppress(RoseError):
            why = await self._lending.rest()
            self._screen.say(f"the borrowed device stopped lending ({why}): it rests, its turns go on elsewhere")
            self._folder.record("rest", at_s=time.monotonic(), why=why)

    def _costs(self) -> dict[str, float]:
        """Processor time by role so far. This process plays the environments; its trainer has a thread of its own."""
        found = self._processor_time.observe(self.processes.process_ids())
        own_s, trainer_s = time.process_time(), self._aside.cpu_s
        return found | {"trainer": trainer_s, "environments": max(0.0, own_s - trainer_s)}


def _stand_back(placement: Placement) -> None:
    """This process plays environments: below serving, and off its cores."""
    os.nice(CONTROL_NICENESS)
    os.sched_setaffinity(0, placement.others)


def _worker_words(placement: Placement) -> str:
    return f"a dedicated worker on {placement.worker}" if placement.worker else "no dedicated worker"


@contextlib.asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
