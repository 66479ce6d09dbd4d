"""Training and weight transfer by arithmetic."""

from __future__ import annotations

import pytest

from rose.sim.step_costs import StepCosts, sync_s, training_s


def test_training_takes_six_flops_per_parameter_and_token() -> None:
    assert training_s(1e9, 1e6, 2, 1e15, 0.5) == pytest.approx(6e15 / 1e15)


def test_log_probabilities_cost_further_passes() -> None:
    costs = StepCosts(1e9, 2, 1e15, 0.5, 5, 1e9, 80.0, 0.5)
    assert costs.training_s(1e6) == pytest.approx(10.0)
    assert costs.sync_s == pytest.approx(2 * (0.5 + 0.1))


def test_a_version_goes_over_two_links() -> None:
    assert sync_s(10e9, 200.0) == pytest.approx(0.8)
