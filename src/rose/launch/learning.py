"""The trainer of a run: learns from groups, and writes what it has learnt where workers and later runs find it.

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
from rose.launch.settings import RunSettings
from rose.models.presets import write_preset

if TYPE_CHECKING:
    from rose.train.step import StepReport, Trainer

CHANGES = ("updated", "rolled_back")
"""Verdicts after which the weights are others than before."""


class Learner:
    """One per run. `version` names the weights that were written last; workers begin with version 0."""

    def __init__(self, aside: Aside, settings: RunSettings, folder: RunFolder) -> None:
        self.version = 0
        self._aside, self._settings, self._folder = aside, settings, folder
        self._source: Path
        self._trainer: Trainer

    async def prepare(self) -> Path:
        """The folder of the model to begin with; a warm start is made if it is not in the cache."""
        if self._settings.rollout_model is not None:
            self._source = Path(self._settings.rollout_model)
        else:
            self._source = await self._aside.do(self._warm_start)
        return self._source

    async def load(self) -> None:
        """Raises ModelError."""
        self._trainer = await self._aside.do(self._loaded)

    async def learn(self, groups: Sequence[Sequence[Trajectory]], counts: StepGroups) -> StepReport:
        """Raises TrainingStarved."""
        return await self._aside.do(lambda: self._trainer.learn(groups, counts))

    async def write_version(self) -> Path:
        """The weights as they are now, under a new version. Raises Unavailable on a full disk."""
        self.version += 1
        return await self._aside.do(lambda: self._exported(self._folder.weights / f"{self.version:06d}"))

    async def write_checkpoint(self, step: int) -> Path:
        return await self._aside.do(lambda: self._saved(self._folder.checkpoints / f"step-{step:06d}", step))

    def _warm_start(self) -> Path:
        from rose.train.warmstart import warm_start

        return warm_start(self._settings.environment)

    def _loaded(self) -> Trainer:
        from rose.train.model import CausalModel, use_threads
        from rose.train.step import Trainer

        use_threads(1)
        return Trainer(CausalModel.load(self._source), self._settings.train)

    def _exported(self, out: Path) -> Path:
        from rose.train.checkpoint import export_model

        export_model(self._trainer.model, self._source, out)
        self._folder.prune(self._folder.weights, self._settings.checkpoint.keep_versions)
        return out

    def _saved(self, out: Path, step: int) -> Path:
        from rose.train.checkpoint import save_checkpoint

        extra = {"run_step": step, "version": self.version, "environment": self._settings.environment}
        save_checkpoint(self._trainer, self._source, out, extra)
        self._folder.prune(self._folder.checkpoints, self._settings.checkpoint.keep)
        return out


def serving_model(preset: str, runs: Path) -> Path:
    """A model with random weights, made once for all runs: what it says is nobody's concern, how long it takes is."""
    folder = runs / "models" / preset
    return folder if (folder / "config.json").exists() else write_preset(preset, folder)


def shown(report: StepReport) -> dict[str, Any]:
    return asdict(report)
