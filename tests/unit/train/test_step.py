"""One step of learning, and the guards that keep a job alive."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rose.core.groups import StepGroups
from rose.core.trajectory import Trajectory
from rose.errors import ConfigError
from rose.models.presets import write_preset
from rose.train.batch import Sample, micro_batches
from rose.train.policy_model import CausalModel, use_threads
from rose.train.step import Snapshot, SpikeGuard, StarvationGuard, Trainer, TrainingStarved, staleness
from rose.train.train_settings import LossSettings, TrainSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    use_threads(1)
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m")


def trajectory(name: str, own: list[int], reward: float, logprob: float = -4.7, version: str = "0") -> Trajectory:
    context = [10, 11, 12, 13]
    return Trajectory(
        trajectory_id=name,
        group_id="0",
        token_ids=tuple(context + own),
        loss_mask=(False,) * 4 + (True,) * len(own),
        logprobs=(0.0,) * 4 + (logprob,) * len(own),
        versions=("",) * 4 + (version,) * len(own),
        reward=reward,
    )


GOOD, BAD = [20, 21, 22], [30, 31, 32, 33]
GROUP = [trajectory("good", GOOD, 1.0), trajectory("bad", BAD, 0.0)]
ALIKE = [trajectory("good", GOOD, 0.0), trajectory("bad", BAD, 0.0)]


def logprob_of(model: CausalModel, own: list[int]) -> float:
    [batch] = micro_batches([Sample(trajectory("", own, 0.0), 0.0, 0.0)], 1, 100)
    with torch.no_grad():
        return float(model.logprobs(batch.token_ids, batch.scored)[0].sum())


def on_policy(trainer: Trainer) -> list[Trajectory]:
    """The group as an engine with the trainer's weights would have reported it."""
    found = []
    for own, reward in ((GOOD, 1.0), (BAD, 0.0)):
        [batch] = micro_batches([Sample(trajectory("", own, 0.0), 0.0, 0.0)], 1, 100)
        with torch.no_grad():
            values = trainer.model.logprobs(batch.token_ids, batch.scored)[0].tolist()
        found.append(replace(trajectory("x", own, reward), logprobs=(0.0,) * 4 + tuple(values)))
    return found


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.snapshot().weights


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_branches_of_one_trajectory_are_learnt_from_as_one_member(folder):
    trainer = Trainer(CausalModel.load(folder), TrainSettings(warm_up_steps=0))
    good = logprob_of(trainer.model, GOOD), logprob_of(trainer.model, [40, 41])
    group = [trajectory("a", GOOD, 1.0), trajectory("a~1", [40, 41], 1.0), trajectory("b", BAD, 0.0)]
    report = trainer.learn([group])
    assert (report.verdict, report.trajectories) == ("updated", 3)
    assert all(logprob_of(trainer.model, own) > before for own, before in zip((GOOD, [40, 41]), good))
    assert trainer.learn([group[:2]]).verdict == "starved", "there is nothing to compare them with"


@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "cispo"])
@pytest.mark.parametrize("updates", [1, 3])
def test_what_was_rewarded_becomes_likelier(folder, loss, updates):
    settings = TrainSettings(updates=updates, warm_up_steps=0, spike_factor=1e9, loss=LossSettings(name=loss))
    trainer = Trainer(CausalModel.load(folder), settings)
    good, bad = logprob_of(trainer.model, GOOD), logprob_of(trainer.model, BAD)
    for _ in range(3):
        report = trainer.learn([on_policy(trainer)])
        assert report.verdict == "updated"
    assert logprob_of(trainer.model, GOOD) > good + 0.1
    assert logprob_of(trainer.model, BAD) < bad - 0.1


def test_the_report_of_a_step(folder):
    trainer = Trainer(CausalModel.load(folder), TrainSettings(warm_up_steps=4, learning_rate=1e-3))
    group = [*on_policy(trainer), trajectory("other", [40], 0.5, version="7")]
    report = trainer.learn([group], StepGroups(drawn=5, kept=1, alike=3, surplus=1))
    assert (report.step, report.verdict, report.groups_kept, report.groups_total) == (1, "updated", 1, 4)
    assert (report.trajectories, report.trained_tokens) == (2 + 1, 3 + 4), "one at the mean has no gradient"
    assert report.tokens_by_version == {"0": 7, "7": 1}
    assert report.learning_rate == pytest.approx(1e-3 / 4)
    assert report.importance_mean == pytest.approx(1.0, abs=1e-4) and report.truncated_share == 0.0
    assert 0 < report.gradient_norm < 100 and report.entropy == pytest.approx(math.log(110), abs=0.2)


def test_how_far_apart_engine_and_trainer_are_and_how_stale(folder):
    trainer = Trainer(CausalModel.load(folder))
    good, bad = on_policy(trainer)
    moved = tuple(value + 0.5 * is_own for value, is_own in zip(bad.logprobs, bad.loss_mask))
    versions = ("",) * 4 + ("4-aa", "4-aa", "6-bb", "6-bb")
    report = trainer.learn([[good, replace(bad, logprobs=moved, versions=versions)]], version="7-cc")
    assert report.logprob_gap_mean == pytest.approx(4 * 0.5 / 7, abs=1e-3)
    assert report.logprob_gap_max == pytest.approx(0.5, abs=1e-3)
    assert report.rollout_kl == pytest.approx(4 * (math.exp(-0.5) + 0.5 - 1) / 7, abs=1e-3)
    assert (report.staleness_max, report.staleness_mean) == (7, pytest.approx((3 * 7 + 2 * 3 + 2 * 1) / 7))


@pytest.mark.parametrize(
    "written, version, expected",
    [
        ({"3": 10}, None, (0.0, 0)),
        ({"3": 10, "5": 10}, None, (1.0, 2)),
        ({"3": 30, "5": 10}, "5", (1.5, 2)),
        ({"6": 1}, "5", (0.0, 0)),
        ({"nightly": 3}, "5", (None, None)),
        ({}, "5", (None, None)),
    ],
)
def test_staleness(written, version, expected):
    assert staleness(written, version) == expected


def test_a_sequence_far_from_what_the_engine_saw_is_left_out(folder):
    settings = TrainSettings(loss=LossSettings(sequence_importance_min=0.5, sequence_importance_max=2.0))
    trainer = Trainer(CausalModel.load(folder), settings)
    good, bad = on_policy(trainer)
    report = trainer.learn([[good, replace(bad, logprobs=tuple(2.0 * value for value in bad.logprobs))]])
    assert report.left_out_share == pytest.approx(4 / 7) and report.verdict == "updated"


def test_a_loss_that_looks_at_the_reference_stays_nearer(folder):
    away = {}
    for beta in (1e-6, 1.0):
        settings = TrainSettings(warm_up_steps=0, learning_rate=1e-3, loss=LossSettings(kl_beta=beta))
        trainer = Trainer(CausalModel.load(folder), settings)
        first = trainer.learn([on_policy(trainer)])
        assert first.reference_kl == pytest.approx(0.0, abs=1e-6), "it is where it began"
        for _ in range(6):
            report = trainer.learn([on_policy(trainer)])
        away[beta] = report.reference_kl
    assert 0 < away[1.0] < away[1e-6] / 2


def test_without_a_reference_no_second_model_is_kept(folder):
    assert Trainer(CausalModel.load(folder)).reference is None


def test_a_trajectory_that_wrote_too_much_loses_reward(folder):
    settings = TrainSettings(overlong_tokens=4, overlong_buffer_tokens=2, warm_up_steps=0)
    trainer = Trainer(CausalModel.load(folder), settings)
    short, long = (replace(member, reward=1.0) for member in on_policy(trainer))
    before = logprob_of(trainer.model, BAD)
    report = trainer.learn([[short, long]])
    assert (report.verdict, report.trajectories_overlong) == ("updated", 2), "alike in reward, not in length"
    assert logprob_of(trainer.model, BAD) < before


def test_rollouts_that_the_trainer_finds_far_likelier_are_truncated(folder):
    trainer = Trainer(CausalModel.load(folder))
    report = trainer.learn([[trajectory("a", GOOD, 1.0, logprob=-9.0), trajectory("b", BAD, 0.0, logprob=-4.7)]])
    assert report.truncated_share == pytest.approx(3 / 7)


def test_micro_batches_give_the_same_gradient_as_one_batch(folder):
    groups = [
        [trajectory(f"{n}{m}", list(range(20 + n, 20 + n + 3 * m)), float(m % 2)) for m in range(1, 6)]
        for n in range(3)
    ]
    norms = []
    for rows, tokens in ((100, 10_000), (2, 10_000), (100, 30)):
        trainer = Trainer(CausalModel.load(folder), TrainSettings(rows_max=rows, tokens_max=tokens))
        norms.append(trainer.learn(groups).gradient_norm)
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-4)


# Trouble


def test_an_update_that_is_not_finite_is_refused(folder, monkeypatch):
    trainer = Trainer(CausalModel.load(folder))
    before = weights_of(trainer)
    monkeypatch.setattr(
        trainer.model, "logits", lambda ids, scored: torch.full((int(scored.sum()), 110), math.nan).requires_grad_()
    )
    assert trainer.learn([GROUP]).verdict == "not_finite"
    assert same(before, weights_of(trainer)) and trainer.moments() == {}
    monkeypatch.undo()
    assert trainer.learn([GROUP]).verdict == "updated", "the job goes on"


def test_weights_that_overflow_are_taken_back(folder, monkeypatch):
    trainer = Trainer(CausalModel.load(folder), TrainSettings(warm_up_steps=0))
    trainer.learn([GROUP])
    before = trainer.snapshot()
    monkeypatch.setattr(trainer, "learning_rate", lambda: math.inf)
    assert trainer.learn([GROUP]).verdict == "not_finite"
    after = trainer.snapshot()
    assert same(before.weights, after.weights)
    assert all(same(state, after.moments[name]) for name, state in before.moments.items())
    assert trainer.model.is_finite()


def test_a_trajectory_with_broken_log_probabilities_is_left_out(folder):
    trainer = Trainer(CausalModel.load(folder))
    report = trainer.learn([[*GROUP, trajectory("broken", BAD, 1.0, logprob=math.nan)]])
    assert (report.verdict, report.trajectories, report.trajectories_refused) == ("updated", 2, 1)


def test_a_gradient_far_beyond_the_usual_is_skipped(folder):
    trainer = Trainer(CausalModel.load(folder))
    trainer.spikes.norms.extend([1e-3] * 5)
    before = weights_of(trainer)
    report = trainer.learn([GROUP])
    assert report.verdict == "spike" and report.gradient_norm > 1e-2
    assert same(before, weights_of(trainer))
    assert len(trainer.spikes.norms) == 5, "a spike does not become usual"


def test_a_norm_far_above_the_median_is_a_spike():
    guard = SpikeGuard(10.0)
    assert not any(guard.is_spike(norm) for norm in (1.0, 500.0, 1.0, 1.2, 0.8)), "too few to know what is usual"
    assert not guard.is_spike(9.9)
    assert guard.is_spike(13.0)
    assert not guard.is_spike(0.0) and len(guard.norms) == 6


@pytest.mark.parametrize(
    "kept, verdicts",
    [
        ([1, 0, 0, 1, 0, 0], ["fine", "starved", "starved", "fine", "starved", "starved"]),
        ([0, 0, 0, 0, 0, 0], ["starved", "starved", "roll_back", "starved", "starved", "stop"]),
        ([0, 0, 0, 5, 0, 0, 0], ["starved", "starved", "roll_back", "fine", "starved", "starved", "stop"]),
    ],
)
def test_starved_steps_lead_to_a_roll_back_and_then_to_a_stop(kept, verdicts):
    guard = StarvationGuard(steps_max=3, roll_backs_max=1)
    assert [guard.observe(groups) for groups in kept] == verdicts


def test_a_starved_job_goes_back_to_the_weights_of_its_last_healthy_batch(folder):
    trainer = Trainer(CausalModel.load(folder), TrainSettings(starved_steps_max=2, roll_backs_max=1, warm_up_steps=0))
    trainer.learn([GROUP])
    healthy = trainer.snapshot()
    trainer.learn([GROUP])  # the update under suspicion
    starved = StepGroups(drawn=9, alike=9)
    assert trainer.learn([], starved).verdict == "starved"
    report = trainer.learn([], starved)
    assert (report.verdict, report.groups_kept, report.groups_total) == ("rolled_back", 0, 9)
    after = trainer.snapshot()
    assert same(healthy.weights, after.weights)
    assert all(same(state, after.moments[name]) for name, state in healthy.moments.items())
    assert trainer.learning_rate() == pytest.approx(trainer.settings.learning_rate / 2)
    trainer.learn([], starved)
    with pytest.raises(TrainingStarved, match="0 of 9 kept"):
        trainer.learn([], starved)


def test_groups_without_variance_starve_too(folder):
    trainer = Trainer(CausalModel.load(folder), TrainSettings(starved_steps_max=2))
    before = weights_of(trainer)
    assert trainer.learn([ALIKE, ALIKE]).verdict == "starved"
    assert same(before, weights_of(trainer))
    with pytest.raises(TrainingStarved):  # there never was a healthy batch to go back to
        trainer.learn([ALIKE])


def test_a_snapshot_is_a_copy(folder):
    trainer = Trainer(CausalModel.load(folder))
    trainer.learn([GROUP])
    snapshot = trainer.snapshot()
    kept = Snapshot({name: value.clone() for name, value in snapshot.weights.items()}, {})
    for _ in range(2):
        trainer.learn([GROUP])
        assert not same(kept.weights, weights_of(trainer))
        assert same(kept.weights, snapshot.weights)
        trainer.restore(snapshot)
        assert same(kept.weights, weights_of(trainer))


def test_an_unknown_loss_is_refused_at_the_start(folder):
    with pytest.raises(ConfigError, match="dapo"):
        Trainer(CausalModel.load(folder), TrainSettings(loss=LossSettings(name="dap")))
