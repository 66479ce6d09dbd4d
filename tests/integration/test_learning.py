"""Real learning, in one process and with fixed seeds: from about one game in ten to nearly half of them and more.

The engine plays, the trainer learns from what it played, and the engine takes the new weights from a folder, as devices
do. Every number comes from seeds, so a run repeats on the same machine.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.local_rollouts import LocalRollouts, Task, synchronous

from rose.config.server_settings import EngineSettings
from rose.core.groups import GroupRules, StepGroups
from rose.core.trajectory import Trajectory
from rose.engines.embedded.engine import EmbeddedEngine
from rose.train.checkpoint import export_model
from rose.train.policy_model import CausalModel, use_threads
from rose.train.step import StepReport, Trainer
from rose.train.train_settings import TrainSettings
from rose.train.warmstart import warm_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Learning:
    """One job, and where its time went."""

    folder: Path
    task: Task
    rules: GroupRules
    settings: TrainSettings
    reports: list[StepReport] = field(default_factory=list)
    rollout_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    delay: int = 0  # by how many versions what is learnt from is older than the weights that learn
    ahead: deque[tuple[list[list[Trajectory]], StepGroups]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        use_threads(1)
        self.engine = EmbeddedEngine.load(self.folder, EngineSettings(kv_memory_mb=256))
        self.rollouts = LocalRollouts(self.engine, self.folder, self.task)
        self.trainer = Trainer(CausalModel.load(self.folder), self.settings)
        self.groups = synchronous(self.rules)

    def step(self, published: Path) -> StepReport:
        begin = time.monotonic()
        while len(self.ahead) <= self.delay:
            self.ahead.append(self.rollouts.play_groups(self.groups))
        kept, counts = self.ahead.popleft()
        played = time.monotonic()
        report = self.trainer.learn(kept, counts, str(self.trainer.step))
        learnt = time.monotonic()
        version = str(self.trainer.step)
        folder = export_model(self.trainer.model, self.folder, published / version)
        self.engine.swap(self.engine.stage(version, folder))
        self.rollout_s += played - begin
        self.train_s += learnt - played
        self.publish_s += time.monotonic() - learnt
        self.reports.append(report)
        return report

    def shares(self) -> str:
        total = self.rollout_s + self.train_s + self.publish_s
        parts = {"rollout": self.rollout_s, "train": self.train_s, "publish": self.publish_s}
        shown = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items())
        return f"{total / len(self.reports):.2f} s per step: {shown}"


def test_a_small_model_learns_to_cross_the_lake(tmp_path, capsys):
    job = Learning(warm_start(), Task(), GroupRules(groups=8, size=8), TrainSettings())
    curve = [job.rollouts.success_rate(200)]
    for _ in range(3):
        for _ in range(5):
            job.step(tmp_path)
        curve.append(job.rollouts.success_rate(200))
    with capsys.disabled():
        print(f"\nheld-out success {', '.join(f'{rate:.1%}' for rate in curve)}; {job.shares()}")
    assert 0.05 <= curve[0] <= 0.2, "a warm start that wins about one game in ten"
    assert curve[-1] >= 0.45
    assert sum(report.verdict == "updated" for report in job.reports) >= 13
    assert all(abs(report.importance_mean - 1) < 0.02 for report in job.reports), "the trainer sees what the engine saw"


@pytest.mark.long
def test_planned_turns_make_a_job_of_rollouts(tmp_path, capsys):
    """Large groups of which few members are trained: far more tokens are generated than learnt from."""
    rules = GroupRules(groups=4, size=64, train_size=8, draws_max=8)
    job = Learning(warm_start("frozenlake-plan"), Task("frozenlake-plan"), rules, TrainSettings())
    curve = [job.rollouts.success_rate(100)]
    reports = [job.step(tmp_path) for _ in range(3)]
    curve.append(job.rollouts.success_rate(100))
    facts = job.engine.facts()
    with capsys.disabled():
        print(f"\nheld-out success {', '.join(f'{rate:.1%}' for rate in curve)}; {job.shares()}")
    assert any(report.verdict == "updated" for report in reports)
    assert facts.generated_tokens > 6 * sum(report.trained_tokens for report in reports) > 0


@pytest.mark.long
def test_tokens_drawn_two_versions_ago_that_have_drifted_are_found(tmp_path, capsys):
    """Few groups and long answers, where it matters. What comes of it is shown and not asserted: with two maps a step
    games won and the gap between trainer and rollouts differ between machines, whose last bits differ."""
    rules = GroupRules(groups=2, size=48, train_size=8, draws_max=8)
    job = Learning(warm_start("frozenlake-plan"), Task("frozenlake-plan"), rules, TrainSettings(), delay=2)
    curve = [job.rollouts.success_rate(100)]
    reports = [job.step(tmp_path) for _ in range(8)]
    curve.append(job.rollouts.success_rate(100))
    with capsys.disabled():
        print(f"\nheld-out success {', '.join(f'{rate:.1%}' for rate in curve)}; {job.shares()}")
    assert [report.staleness_max for report in reports] == [0, 1] + [2] * 6
    assert max(report.drifted_share for report in reports) > 0.01
