"""The rollout function for TRL's synchronous trainer: every token is of the weights that were just published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.adapters.trl_world import FakePool, held, settings

from rose.adapters import turn_watch
from rose.adapters.trl import TrlRollouts
from rose.errors import ConfigError, Unavailable
from rose.models.tensors import open_tensors

PROMPTS = ["goal", [{"role": "user", "content": "hole"}], "goal"]


class Model:
    """A model by its parameters."""

    def __init__(self, folder: Path) -> None:
        tensors = open_tensors(folder)
        self.weights = {name: torch.from_numpy(tensors.float32(name).copy()) for name in tensors.names()}

    def named_parameters(self) -> Any:
        yield from self.weights.items()


class Accelerator:
    def __init__(self, *, is_main_process: bool = True) -> None:
        self.is_main_process, self.barriers = is_main_process, 0

    def unwrap_model(self, model: Any) -> Any:
        return model

    def wait_for_everyone(self) -> None:
        self.barriers += 1


@pytest.fixture
def trainer(folder: Path) -> Any:
    return SimpleNamespace(
        state=SimpleNamespace(global_step=0), accelerator=Accelerator(), model=Model(folder), args=settings()
    )


def test_each_prompt_gets_one_answer_in_its_place(pool: FakePool, trainer: Any) -> None:
    found = TrlRollouts(pool)(PROMPTS, trainer)
    assert set(found) == {"prompt_ids", "completion_ids", "logprobs"}
    assert found["prompt_ids"][0] == found["prompt_ids"][2] != found["prompt_ids"][1]
    for ids, logprobs in zip(found["completion_ids"], found["logprobs"], strict=True):
        assert len(ids) == len(logprobs) > 0 and set(logprobs) == {-0.5}
    assert all(not body.is_lost for body in pool.gateway.ended.values()) and len(pool.gateway.ended) == 3


def test_weights_are_published_once_for_each_step(pool: FakePool, trainer: Any) -> None:
    rollouts = TrlRollouts(pool)
    for step in (0, 0, 1):
        trainer.state.global_step = step
        rollouts(PROMPTS, trainer)
        trainer.model.weights["model.norm.weight"] += 1.0
    assert [found["version"][:2] for found in pool.gateway.published] == ["1-", "2-"]
    assert trainer.accelerator.barriers == 2
    assert len(pool.gateway.ended) == 9  # no name twice


def test_other_ranks_take_part_and_publish_nothing(pool: FakePool, trainer: Any) -> None:
    trainer.accelerator = Accelerator(is_main_process=False)
    assert len(TrlRollouts(pool)(PROMPTS, trainer)["completion_ids"]) == 3
    assert pool.gateway.published == [] and trainer.accelerator.barriers == 1


def test_tokens_of_other_weights_are_refused(pool: FakePool, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def state() -> dict[str, Any]:
        return {"version": "2-newer"}

    rollouts = TrlRollouts(pool)
    rollouts(PROMPTS, trainer)
    monkeypatch.setattr(pool.gateway, "pool", state)
    with pytest.raises(ConfigError, match="other weights than 2-newer") as raised:
        rollouts(PROMPTS, trainer)
    assert "max_staleness 0" in str(raised.value)


def test_a_pool_that_ends_no_rollout_is_an_error_that_says_what_it_lacks(
    pool: FakePool, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_watch, "WATCH_S", 0.01)
    pool.gateway.pause, pool.gateway.workers = held(), ["closed"]
    with pytest.raises(Unavailable, match=r"no turn has ended for 0 s: 3 turns wait .* w0 is closed"):
        TrlRollouts(pool, stale_after_s=0.05)(PROMPTS, trainer)


def test_an_adapter_of_peft_is_refused(pool: FakePool, trainer: Any) -> None:
    trainer.model.peft_config = {}
    with pytest.raises(ConfigError, match="adapter of PEFT"):
        TrlRollouts(pool)(PROMPTS, trainer)
