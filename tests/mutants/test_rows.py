"""The rows of the mutation table fit the sources, so that `make mutants` tests what it says."""

from __future__ import annotations

import pytest
from tests.mutants.__main__ import problem_of
from tests.mutants.table import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_a_mutant_stands_once_in_its_file(mutant: Mutant) -> None:
    assert problem_of(mutant) == ""
    assert mutant.old != mutant.new


def test_names_of_mutants_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 26
