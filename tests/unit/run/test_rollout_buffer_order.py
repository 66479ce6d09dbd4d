"""What a step trains on depends on nothing but its groups' numbers: not on who ends first, not on being interrupted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.fake_gateway import FakeGateway
from tests.unit.run.test_run_rollouts import rollouts_on, small
from tests.unit.synchronous_steps import play_steps

from rose.api.requests import TurnAnswer, TurnSampling
from rose.core.trajectory import Trajectory
from rose.models.model_folder import ModelFolder, load_model_folder
from rose.models.presets import write_preset
from rose.run.resuming import ResumePoint
from rose.run.trajectory_ledger import Balance

Kept = list[list[tuple[str, tuple[int, ...], float]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return load_model_folder(write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "m"))


class Jumbled(FakeGateway):
    """Answers the same, each time in another order."""

    def __init__(self, model: ModelFolder, seed: int) -> None:
        super().__init__(model)
        self._dice = random.Random(seed)

    def trajectory(self, name: str, *more: Any) -> Any:
        at_once = super().trajectory(name, *more)

        async def generate(token_ids: Sequence[int], sampling: TurnSampling) -> TurnAnswer:
            for _ in range(self._dice.randrange(20)):
                await asyncio.sleep(0)
            answer: TurnAnswer = await at_once(token_ids, sampling)
            return answer

        return generate


def shown(groups: Sequence[Sequence[Trajectory]]) -> Kept:
    return [[(found.trajectory_id, found.token_ids, found.reward) for found in group] for group in groups]


async def play(rollouts: Any, steps: int, start: ResumePoint | None = None) -> tuple[list[Kept], dict[str, Any]]:
    played, state = await play_steps(rollouts, steps, start)
    return [shown(step.kept) for step in played], state


def test_the_order_in_which_episodes_end_changes_nothing(model):
    found = []
    for seed in (1, 2, 3):
        rollouts, journal = rollouts_on(Jumbled(model, seed), model, small(groups=3, train_size=3))
        kept, _ = asyncio.run(play(rollouts, 2))
        found.append((kept, [fact for fact, _ in journal]))
    assert found[0][0] == found[1][0] == found[2][0] and all(len(step) == 3 for step in found[0][0])
    assert found[0][1] != found[1][1], "the orders were alike, and nothing was tried"


def test_a_run_that_goes_on_plays_the_same_groups(model):
    whole, _ = rollouts_on(Jumbled(model, 1), model, small())
    (first, second), at_the_end = asyncio.run(play(whole, 2))
    killed, _ = rollouts_on(Jumbled(model, 2), model, small())
    kept, state = asyncio.run(play(killed, 1))
    assert kept == [first] and state["outstanding"] == []
    start = ResumePoint(step=1, next_group=state["next_group"], balance=Balance(**state["balance"]))
    resumed, _ = rollouts_on(Jumbled(model, 3), model, small(), start.balance)
    kept, state = asyncio.run(play(resumed, 1, start))
    assert kept == [second]
    assert resumed.ledger.balance() == whole.ledger.balance() and state == at_the_end
