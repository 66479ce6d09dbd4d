"""Names with numbers in one text, such as `gamma:rate=2,cv=4`."""

from __future__ import annotations

import math

import pytest

from rose.config.spec_text import nearest_example, read_settings
from rose.errors import ConfigError

KNOWN = {"rate": math.nan, "cv": 1.0}
EXAMPLE = "gamma:rate=2,cv=4"


def read(spec: str) -> dict[str, float]:
    return read_settings("generator", "gamma", spec, KNOWN, EXAMPLE)


def test_settings_are_laid_over_the_known_ones() -> None:
    assert read("gamma:rate=2") == {"rate": 2.0, "cv": 1.0}
    assert read("gamma:cv=0.5,rate=1e3") == {"rate": 1000.0, "cv": 0.5}


@pytest.mark.parametrize(
    "spec, words",
    [
        ("gamma", ["generator `gamma` needs rate", EXAMPLE]),
        ("gamma:rat=2", ["has no setting `rat`", "did you mean `rate`?"]),
        ("gamma:zzz=2", ["has no setting `zzz`", "it has rate, cv", EXAMPLE]),
        ("gamma:rate=", ["`rate`", "not a number above 0"]),
        ("gamma:rate=fast", ["not a number above 0: `fast`"]),
        ("gamma:rate=0", ["not a number above 0: `0`"]),
        ("gamma:rate=nan", ["not a number above 0: `nan`"]),
        ("gamma:rate=inf", ["not a number above 0: `inf`"]),
    ],
)
def test_a_wrong_text_is_refused_with_what_to_write(spec: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        read(spec)
    assert [word for word in words if word not in str(refused.value)] == []


def test_an_unknown_name_gets_the_nearest_example_or_all() -> None:
    examples = {"gamma": EXAMPLE, "poisson": "poisson:rate=1"}
    assert nearest_example("gama", examples, "use") == f"did you mean `{EXAMPLE}`?"
    assert nearest_example("zzz", examples, "use") == f"use {EXAMPLE}, poisson:rate=1"
