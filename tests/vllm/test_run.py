"""`rose run` on vLLM: three steps of learning, with vLLM as the dedicated worker and as the device that is borrowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.running import Run
from tests.vllm.engines import PYTHON

from rose.train.warmstart import Recipe, make_warm_start

RUN_S = 600.0
OVERRIDES = (
    "steps=3",
    "evaluation.every_steps=0",
    "groups.size=8",
    "worker.engine=vllm",
    "worker.max_sequences=1",  # so that the run outlasts the learning of what serving's steps cost
    "serving.engine=vllm",
    "serving.max_context_tokens=512",
    "serving.lend.mode=idle",
    "serving.lend.ttft_ms=10000",  # that a busy machine keeps too
    "serving.lend.tpot_ms=2000",
    "traffic.source=gamma:rate=6,cv=1",
    f"vllm_python={PYTHON}",
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    recipe = Recipe(games=100, epochs=1, rows=4, learning_rate=2e-3, warm_up_updates=5, turns_max=4)
    found = Run(tmp_path, make_warm_start(recipe, tmp_path / "frozenlake-1m"), *OVERRIDES)
    yield found
    found.end()


def test_three_steps_on_a_dedicated_and_a_borrowed_vllm(run: Run) -> None:
    assert run.wait(RUN_S) == 0, run.words
    summary = run.summary()
    assert summary["steps"] == 3 and summary["begun"] == summary["returned"] == summary["trajectories"] == 48
    assert (summary["lost"], summary["doubled"], summary["differing"]) == (0, 0, 0)
    turns = summary["turns_by_pool"]
    assert turns["dedicated"] > 0 and turns["borrowed"] > 0, (turns, run.words)
    [weights] = run.metrics("weights")
    assert weights["workers"] == dict.fromkeys(("borrowed", "dedicated"), weights["hash"])
    assert run.metrics("death") == []
    assert run.processes() == {}
