"""The trainer of a run: learns from groups, publishes what it has learnt to workers, and keeps it for later runs.

All of it computes in the trainer's own thread, which has its own priority and cores, as Linux gives them to single
threads. torch is imported there too, while the devices start. Arithmetic under way cannot be interrupted, and a process
that ends in the middle of it crashes. So a run that is stopped waits a little for the update to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rose.core.groups import StepGroups
from rose.core.trajectory import Trajectory
from rose.models.presets import write_preset
from rose.run.publishing import Publishing
from rose.run.resuming import ResumePoint
from rose.run.run_folder import RunFolder
from rose.run.run_settings import RunSettings
from rose.run.trainer_rank import rank_of_torchrun

if TYPE_CHECKING:
    from rose.run.trainer_ranks import RankTeam
    from rose.train.step import StepReport, Trainer
    from rose.weights.publish import PublishedVersion

Result = TypeVar("Result")


class TrainerThread:
    """Thread beside the event loop that runs one function after the other."""

    def __init__(self, niceness: int, cores: tuple[int, ...]) -> None:
        self.cpu_s = 0.0
        self._niceness, self._cores = niceness, cores
        self._loop = asyncio.get_running_loop()
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="trainer", daemon=True).start()

    async def do(self, function: Callable[[], Result]) -> Result:
        outcome: asyncio.Future[Result] = self._loop.create_future()
        self._work.put((function, outcome))
        return await outcome

    def _run(self) -> None:
        thread = threading.get_native_id()
        niceness = max(self._niceness, os.getpriority(os.PRIO_PROCESS, thread))  # only root may go up
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
        os.sched_setaffinity(thread, self._cores)
        while True:
            function, outcome = self._work.get()
            result: Any = None
            error: BaseException | None = None
            try:
                result = function()
            except Exception as raised:
                error = raised
            self.cpu_s = time.thread_time()
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the caller
                self._loop.call_soon_threadsafe(_settle, outcome, result, error)


def _settle(outcome: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if outcome.done():  # the caller was cancelled
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)


CHANGES = ("updated", "rolled_back")
"""Verdicts after which the weights are others than before."""


class Learner:
    """The trainer of one run. `published` are the weights that were published last; a new run begins with version 0."""

    def __init__(
        self, thread: TrainerThread, settings: RunSettings, folder: RunFolder, start: ResumePoint | None = None
    ) -> None:
        self.publishing = Publishing(settings.weights, folder)
        self.published: PublishedVersion
        self._thread, self._settings, self._folder = thread, settings, folder
        self._start = start or ResumePoint()
        self._source: Path
        self._trainer: Trainer
        self._team: RankTeam | None = None  # of a trainer on several ranks
        self.meeting = folder.path / "ranks.meeting"  # where ranks of this machine find each other
        self.meeting.unlink(missing_ok=True)

    async def prepare(self) -> Path:
        """Return the folder of the model to begin with; a warm start is made if it is not in the cache.

        Raises ConfigError, Unavailable without a relay.
        """
        await self._thread.do(self.publishing.open)
        if self._settings.rollout_model is not None:
            self._source = Path(self._settings.rollout_model)
        else:
            from rose.train.warmstart import warm_start

            self._source = await self._thread.do(lambda: warm_start(self._settings.environment))
        return self._source

    async def load(self) -> None:
        """Load the model, put the trainer where the run begins, and publish it as it is.

        Raises ModelError, Unavailable.
        """
        self.published = await self._thread.do(self._load)

    async def learn(self, groups: Sequence[Sequence[Trajectory]], counts: StepGroups) -> StepReport:
        """Learn from groups. Raises TrainingStarved."""
        trainer = self._team or self._trainer
        return await self._thread.do(lambda: trainer.learn(groups, counts, self.published.label))

    async def publish(self) -> PublishedVersion:
        """Publish the weights under the next version. Raises Unavailable if the relay fails or is full."""
        publisher = self._team or self.publishing
        self.published = await self._thread.do(lambda: publisher.publish(self.published.version.version + 1))
        return self.published

    async def write_checkpoint(self, step: int, rollouts: dict[str, Any]) -> Path:
        """Write a checkpoint; `rollouts` is what the buffer needs to resume after this step (`RolloutBuffer.state`)."""
        out = self._folder.checkpoints / f"step-{step:06d}"
        version = self.published.version
        extra = {
            "environment": self._settings.environment,
            "run_step": step,
            "version": version.version,
            "epoch": version.epoch,
            "hash": self.published.hash,
            **rollouts,
        }
        return await self._thread.do(lambda: self._save(out, extra))

    async def finish(self) -> None:
        """Wait for what the other ranks of the trainer have under way, before they are ended."""
        if self._team is not None:
            await self._thread.do(self._team.finish)

    async def close(self) -> None:
        """Wait for the publication under way, and close the relay."""
        if self._team is not None:
            await self._thread.do(self._team.end)
        await self._thread.do(self.publishing.close)

    def _load(self) -> PublishedVersion:
        train, start = self._settings.train, self._start
        if train.ranks == 1:
            self._trainer = self._load_trainer()
            return self.publishing.begin(self._trainer.model.weights, start.version, start.epoch)
        from rose.run.trainer_ranks import RankTeam

        meeting = self.meeting if rank_of_torchrun(train.ranks) is None else None
        self._team = RankTeam(train, self.publishing, meeting)
        self._team.load(self._source, start.checkpoint)
        return self._team.begin(start.version, start.epoch)

    def _load_trainer(self) -> Trainer:
        from rose.train.policy_model import CausalModel, use_threads
        from rose.train.step import Trainer

        use_threads(1)
        if self._settings.train.is_plain:
            trainer = Trainer(CausalModel.load(self._source), self._settings.train)
        else:
            from rose.train.module_model import ModuleModel

            trainer = Trainer(ModuleModel(self._source, self._settings.train), self._settings.train)
        if self._start.checkpoint is not None:
            from rose.train.checkpoint import load_checkpoint

            load_checkpoint(trainer, self._start.checkpoint)
        return trainer

    def _save(self, out: Path, extra: dict[str, Any]) -> Path:
        from rose.train.checkpoint import save_checkpoint

        if self._team is not None:
            self._team.save(self._source, out, extra)
        else:
            save_checkpoint(self._trainer, self._source, out, extra)
        self._folder.prune(self._folder.checkpoints, self._settings.checkpoint.keep)
        return out


def serving_model(preset: str, runs: Path) -> Path:
    """Return a model with random weights, made once for all runs: its speed matters, its answers do not."""
    folder = runs / "models" / preset
    return folder if (folder / "config.json").exists() else write_preset(preset, folder)


def fields_of_report(report: StepReport) -> dict[str, Any]:
    """Return the fields of a step's record, in which `trajectories` are those that were played."""
    fields = asdict(report)
    del fields["step"]
    return fields | {"trained_trajectories": fields.pop("trajectories")}
