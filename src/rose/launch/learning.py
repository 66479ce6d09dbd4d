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
from rose.launch.start import Start, start_to_keep
from rose.models.presets import write_preset

if TYPE_CHECKING:
    from rose.train.step import StepReport, Trainer
    from rose.weights.publish import Published

CHANGES = ("updated", "rolled_back")
"""Verdicts after which the weights are others than before."""


class Learner:
    """One per run. `published` are the weights that were published last; a new run begins with version 0."""

    def __init__(self, aside: Aside, settings: RunSettings, folder: RunFolder, start: Start | None = None) -> None:
        self.publishing = Publishing(settings.weights, folder)
        self.published: Published
        self._aside, self._settings, self._folder = aside, settings, folder
        self._start = start or Start()
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
        """Load the model, put the trainer where the run begins, and publish it as it is.

        Raises ModelError, Unavailable.
        """
        self._trainer = await self._aside.do(self._loaded)
        self.published = await self._aside.do(self._begun)

    async def learn(self, groups: Sequence[Sequence[Trajectory]], counts: StepGroups) -> StepReport:
        """Raises TrainingStarved."""
        return await self._aside.do(lambda: self._trainer.learn(groups, counts, self.published.label))

    async def publish(self) -> Published:
        """The weights as they are now, under the next version. Raises Unavailable if the relay fails or is full."""
        self.published = await self._aside.do(lambda: self.publishing.publish(self.published.version.version + 1))
        return self.published

    async def write_checkpoint(self, step: int, rollouts: dict[str, Any]) -> Path:
        """`rollouts` is what they need to go on behind this step (`Rollouts.state`)."""
        out = self._folder.checkpoints / f"step-{step:06d}"
        extra = {"environment": self._settings.environment, **start_to_keep(step, self.published, rollouts)}
        return await self._aside.do(lambda: self._saved(out, extra))

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
        trainer = Trainer(CausalModel.load(self._source), self._settings.train)
        if self._start.checkpoint is not None:
            from rose.train.checkpoint import load_checkpoint

            load_checkpoint(trainer, self._start.checkpoint)
        return trainer

    def _begun(self) -> Published:
        return self.publishing.begin(self._trainer.model.weights, self._start.version, self._start.epoch)

    def _saved(self, out: Path, extra: dict[str, Any]) -> Path:
        from rose.train.checkpoint import save_checkpoint

        save_checkpoint(self._trainer, self._source, out, extra)
        self._folder.prune(self._folder.checkpoints, self._settings.checkpoint.keep)
        return out


def serving_model(preset: str, runs: Path) -> Path:
    """A model with random weights, made once for all runs: what it says is nobody's concern, how long it takes is."""
    folder = runs / "models" / preset
    return folder if (folder / "config.json").exists() else write_preset(preset, folder)


def shown(report: StepReport) -> dict[str, Any]:
    """For the step's line, where `trajectories` are those that were played."""
    found = asdict(report)
    del found["step"]
    return found | {"trained_trajectories": found.pop("trajectories")}
