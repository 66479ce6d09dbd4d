"""A row of the mutation table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below src/rose
    old: str
    new: str
    tests: tuple[str, ...]  # files or node ids below tests; the first failure ends the mutant's run
    only: str = ""  # expression for pytest -k
