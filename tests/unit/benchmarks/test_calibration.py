"""benchmarks/calibration.py: errors and bars, and the forecast that it is made of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import calibration
from calibration import QUANTITIES, bars_of, errors_of, predicted_of, traffic


def rows(*errors: float) -> list[dict[str, Any]]:
    return [{"quantity": name, "error": error} for error in errors for name in QUANTITIES]


def test_the_error_of_a_quantity_is_the_median_of_its_repeats() -> None:
    assert set(errors_of(rows(0.5, -0.02, 0.03)).values()) == {0.03}


def test_a_forecast_that_is_too_low_is_wrong_too() -> None:
    assert [bar["ok"] for bar in bars_of(errors_of(rows(-0.07)))] == [False, True, True]
    assert [bar["ok"] for bar in bars_of(errors_of(rows(0.2)))] == [False, False, False]


def test_every_quantity_is_predicted() -> None:
    trace = traffic(4.0, 0)
    names = (Path("cpu"), Path("cpu-frozenlake-1m"))
    assert predicted_of(names, trace, 4.0, 0).keys() == set(QUANTITIES)
    assert calibration.RATE > 0 and trace.arrival_s[-1] <= 4.0
