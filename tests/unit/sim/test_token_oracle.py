"""The tokens of the simulated rollout model."""

from __future__ import annotations

from rose.engines.base import Budget, Request, Sampling
from rose.engines.profiles import load_profile
from rose.sim.token_oracle import LawfulEngine, is_complete_answer, oracle_token


def answer(weights: int, *, seed: int = 3) -> list[int]:
    engine = LawfulEngine(load_profile("cpu"))
    engine.weights = weights
    engine.add(Request("a", (9, 9, 9), Sampling(max_tokens=20, seed=seed)))
    found: list[int] = []
    while (plan := engine.plan(Budget(512, 8))) is not None:
        found += [token_id for event in engine.step(plan) for token_id in event.token_ids]
    return found


def test_the_oracle_engine_samples_by_seed_position_and_weights():
    found = answer(weights=4)
    assert found == [oracle_token(3, 3 + index, 4)[0] for index in range(len(found))]
    assert is_complete_answer(found, Sampling(max_tokens=20))
    assert not is_complete_answer(found[:-1], Sampling(max_tokens=20))
    assert found != answer(weights=5) and found != answer(weights=4, seed=2)
