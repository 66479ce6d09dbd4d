"""The trainer of a run, put where its checkpoint was made: it publishes the same weights and learns the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.unit.train.test_step import GROUP

from rose.core.groups import StepGroups
from rose.models.presets import write_preset
from rose.run.learning import Learner, TrainerThread
from rose.run.resuming import ResumePoint, start_of
from rose.run.run_folder import RunFolder
from rose.run.run_settings import RunSettings, load_run_settings
from rose.run.trajectory_ledger import Balance

BALANCE = asdict(Balance())


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    model = write_preset("frozenlake-1m", tmp_path / "m")
    return replace(load_run_settings(), runs=str(tmp_path), name="it", rollout_model=str(model))


@pytest.fixture
def folder(settings: RunSettings) -> Iterator[RunFolder]:
    made = RunFolder(settings)
    yield made
    made.close()


async def learnt(
    settings: RunSettings, folder: RunFolder, start: ResumePoint, *, is_kept: bool
) -> list[tuple[int, str]]:
    """Version and hash of what was published: at the beginning, and after each of two steps."""
    learner = Learner(TrainerThread(0, tuple(os.sched_getaffinity(0))), settings, folder, start)
    await learner.prepare()
    await learner.load()
    found = [learner.published]
    for step in (start.step + 1, start.step + 2):
        await learner.learn([GROUP], StepGroups(drawn=1, kept=1))
        found.append(await learner.publish())
        if is_kept and step == 1:
            await learner.write_checkpoint(step, {"next_group": 8, "balance": BALANCE})
    await learner.close()
    return [(published.version.version, published.hash) for published in found]


def test_a_resumed_trainer_publishes_what_it_had_and_learns_the_same(settings, folder):
    whole = asyncio.run(learnt(settings, folder, ResumePoint(), is_kept=True))
    assert [version for version, _ in whole] == [0, 1, 2] and len({found for _, found in whole}) == 3
    start, _ = start_of(folder)
    assert (start.step, start.version, start.next_group) == (1, 1, 8) and start.epoch > 0
    resumed = asyncio.run(learnt(settings, folder, start, is_kept=False))
    assert resumed[:2] == whole[1:]
