"""`rose run` with an agent of the user's own, written against the OpenAI client, as its rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.devices import ROOT
from tests.integration.running import Run

from rose.train.recipes import Recipe
from rose.train.warmstart import make_warm_start

AGENT = ROOT / "examples" / "own_agent.py"
GAP_MAX = 0.01  # nats: what engine and trainer say of the same tokens under the same weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(games=100, epochs=1, rows=4, learning_rate=2e-3, warm_up_updates=5, turns_max=4)
    return make_warm_start(recipe, tmp_path_factory.mktemp("model") / "frozenlake-1m")


@pytest.mark.slow
@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_an_agent_written_against_the_openai_client_is_trained(tmp_path, model, is_asynchronous):
    run = Run(tmp_path, model, f"agent={AGENT}:play", f"asynchrony.is_used={str(is_asynchronous).lower()}")
    try:
        assert run.wait() == 0, run.words
    finally:
        run.end()
    summary, steps = run.summary(), run.metrics("step")
    assert summary["steps"] == 2 and summary["begun"] == summary["returned"] + summary["written_off"]
    assert (summary["lost"], summary["doubled"], summary["differing"]) == (0, 0, 0)
    assert all(step["episodes_failed"] == 0 for step in steps) and summary["success_after"] is not None
    learnt = [step for step in steps if step["verdict"] == "updated"]
    assert learnt and all(step["trained_tokens"] > 0 and step["logprob_gap_mean"] < GAP_MAX for step in learnt)
    assert summary["generated_tokens"] > summary["turns"] >= summary["trajectories"]
