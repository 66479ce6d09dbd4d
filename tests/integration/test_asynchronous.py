"""`rose run` with rollouts that never stop, from beginning to end, with a borrowed device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.running import Run, kill_all
from tests.unit.launch_lines import read_lines

from rose.core.staleness import version_number
from rose.train.recipes import Recipe
from rose.train.warmstart import make_warm_start

pytestmark = pytest.mark.slow

STEPS, BOUND, SIZE = 6, 2, 8
JOB = (
    f"steps={STEPS}",
    "asynchrony.is_used=true",
    f"asynchrony.max_staleness={BOUND}",
    "groups.groups=2",
    f"groups.size={SIZE}",
    "groups.draws_max=60",
    "worker.max_sequences=4",  # what is left over is for the borrowed device
    "evaluation.every_steps=0",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It plays well enough for some members of most groups to do better than others."""
    recipe = Recipe(games=400, epochs=1, rows=4, learning_rate=2e-3, warm_up_updates=5, turns_max=4)
    return make_warm_start(recipe, tmp_path_factory.mktemp("model") / "frozenlake-1m")


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.end()


def started(runs: list[Run], folder: Path, model: Path, *overrides: str) -> Run:
    runs.append(Run(folder, model, *JOB, *overrides))
    return runs[-1]


def check_bound(steps: list[dict[str, Any]]) -> None:
    """Token by token: of every batch the version that wrote it, against the one that learnt from it."""
    for step in steps:
        if step["verdict"] == "updated":
            learnt_by = version_number(step["version"]) - 1
            ages = {learnt_by - version_number(name) for name in step["tokens_by_version"]}
            assert ages and min(ages) >= 0 and max(ages) <= BOUND
            assert step["staleness_max"] == max(ages) and 0 <= step["staleness_mean"] <= BOUND


def test_rollouts_go_on_while_the_trainer_learns_and_no_token_is_too_old(tmp_path, model, runs):
    run = started(runs, tmp_path, model)
    assert run.wait() == 0, run.words
    steps, summary = run.metrics("step"), run.summary()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    check_bound(steps)
    # Not that some token is old: on a busy machine the groups of a step may all begin after the last publication.
    assert sum(step["turns_while_learning"] for step in steps) > 0, "rollouts stopped while the trainer worked"
    assert (summary["lost"], summary["doubled"], summary["differing"]) == (0, 0, 0)
    assert summary["begun"] == summary["returned"] + summary["written_off"]
    assert summary["begun"] >= STEPS * 2 * SIZE and summary["turns_by_pool"]["borrowed"] > 0
    check_measures(steps)
    check_trajectories(run)
    [weights] = run.metrics("weights")
    assert set(weights["workers"].values()) == {weights["hash"]} and run.metrics("behind") == []
    assert len(run.metrics("sync")) == STEPS and run.processes() == {}


def check_measures(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert step["wait_s"] + step["train_s"] + step["publish_s"] == pytest.approx(step["step_s"], abs=1e-3)
        assert {"logprob_gap_mean", "rollout_kl", "entropy", "clipped_share", "left_out_share"} <= step.keys()
        assert step["groups_kept"] <= step["groups_total"] and step["groups"]["stale"] >= 0


def check_trajectories(run: Run) -> None:
    """Each that ended did so once, and each group met one fate."""
    lines = read_lines(run.folder / "journal.jsonl")
    ended = [line["fact"]["trajectory_id"] for line in lines if line["fact"]["kind"] == "MemberEnded"]
    assert len(set(ended)) == len(ended)
    fates = [decision["group"] for line in lines for decision in line["decisions"] if decision["kind"] == "Drop"]
    assert len(set(fates)) == len(fates)


def test_a_comparison_takes_the_device_away_under_running_turns(tmp_path, model, runs):
    run = started(runs, tmp_path, model, "compare=true", "steps=4", "worker.max_sequences=2")
    assert run.wait() == 0, run.words
    steps, summary = run.metrics("step"), run.summary()
    assert [step["is_borrowed"] for step in steps] == [True, False, False, True]
    assert steps[2]["turns_by_pool"]["borrowed"] == 0, "held back since the step before"
    assert (summary["lost"], summary["doubled"], summary["differing"]) == (0, 0, 0)
    assert summary["throughput_ratio"] > 0
    check_bound(steps)


def check_drawn_again(run: Run) -> None:
    """What no step had learnt from comes first, then the groups that nobody had drawn."""
    facts = [line["fact"] for line in read_lines(run.folder / "journal.jsonl")]
    [place] = [place for place, fact in enumerate(facts) if fact["kind"] == "RunResumed"]
    again, first = facts[place]["outstanding"], facts[place]["next_group"]
    drawn = [fact["group"] for fact in facts[place:] if fact["kind"] == "Draw"]
    assert again and drawn == [*again, *range(first, first + len(drawn))][: len(drawn)]


def test_an_asynchronous_run_that_is_killed_goes_on(tmp_path, model, runs):
    run = started(runs, tmp_path, model, "steps=4")
    run.until_said(r"step +2/4")
    kill_all(run)
    run.wait()
    runs.append(Run.resumed(run.folder))
    assert runs[-1].wait() == 0, runs[-1].words
    summary = runs[-1].summary()
    assert summary["steps"] == 4 and summary["lost"] == summary["doubled"] == 0
    assert summary["begun"] == summary["returned"] + summary["written_off"]
    check_drawn_again(runs[-1])
    check_bound([step for step in runs[-1].metrics("step") if step["step"] > 2])
