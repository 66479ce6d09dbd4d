"""The trainer of a run: learns from groups, publishes what it has learnt to workers, and keeps it for later runs.

Everything here runs in the trainer's own thread. torch is imported there too, while the devices start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.core.groups import StepGroups
from rose.core.trajectory import Trajectory
from rose.launch.aside import Aside
from rose.launch.folder import RunFolder
from rose.launch.publishing import Publishing
from rose.launch.settings import RunSettings
from rose.models.presets import write_preset

if TYPE_CHECKING:
    from rose.train.step import StepReport, Trainer
    from rose.weights.publish import Published

CHANGES = ("updated", "rolled_back")
"""Verdicts after which the weights are others than before."""


class Learner:
    """One per run. `published` are the weights that were published last; a run begins with version 0."""

    def __init__(self, aside: Aside, settings: RunSettings, folder: RunFolder) -> None:
        self.publishing = Publishing(settings.weights, folder)
        self.published: Published
        self._aside, self._settings, self._folder = aside, settings, folder
        self._source: Path
        self._trainer: Trainer

    async def prepare(self) -> Path:
        """The folder of the model to begin with; a warm start is made if it is not in the cache.

        Raises ConfigError, Unavailable without a relay.
        """
        await self._aside.do(self.publishing.open)
        if self._settings.rollout_model is not None:
            self._source = Path(self._settings.rollout_model)
        else:
            self._source = await self._aside.do(self._warm_start)
        return self._source

    async def load(self) -> None:
        """Load the model, and publish it as it is. Raises ModelError, Unavailable."""
        self._trainer = await self._aside.do(self._loaded)
        self.published = await self._aside.do(lambda: self.publishing.begin(self._trainer.model.weights))

    async def learn(self, groups: Sequence[Sequence[Trajectory]], counts: StepGroups) -> StepReport:
        """Raises TrainingStarved."""
        return await self._aside.do(lambda: self._trainer.learn(groups, counts, self.published.label))

    async def publish(self) -> Published:
        """The weights as they are now, under the next version. Raises Unavailable if the relay fails or is full."""
        self.published = await self._aside.do(lambda: self.publishing.publish(self.published.version.version + 1))
        return self.published

    async def write_checkpoint(self, step: int) -> Path:
        return await self._aside.do(lambda: self._saved(self._folder.checkpoints / f"step-{step:06d}", step))

    async def close(self) -> None:
        """What is on its way comes to its end."""
        await self._aside.do(self.publishing.close)

    def _warm_start(self) -> Path:
        from rose.train.warmstart import warm_start

        return warm_start(self._settings.environment)

    def _loaded(self) -> Trainer:
        from rose.train.model import CausalModel, use_threads
        from rose.train.step import Trainer

        use_threads(1)
        return Trainer(CausalModel.load(self._source), self._settings.train)

    def _saved(self, out: Path, step: int) -> Path:
        from rose.train.checkpoint import save_checkpoint

        extra = {"run_step": step, "version": self.published.version.version, "environment": self._settings.environment}
        save_checkpoint(self._trainer, self._source, out, extra)
        self._folder.prune(self._folder.checkpoints, self._settings.checkpoint.keep)
        return out


def serving_model(preset: str, runs: Path) -> Path:
    """A model with random weights, made once for all runs: what it says is nobody's concern, how long it takes is."""
    folder = runs / "models" / preset
    return folder if (folder / "config.json").exists() else write_preset(preset, folder)


def shown(report: StepReport) -> dict[str, Any]:
    return asdict(report)
