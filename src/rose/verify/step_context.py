"""What a step of the kit gets, and how it says what it found.

A step is an async function of a `StepContext`. It adds checks, figures, facts and notes to `findings`, and raises a
`RoseError` or any other exception if it cannot go on. The step has passed if it returned and every check held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rose.bounds import NAME_CHARACTERS_MAX, TEXT_CHARACTERS_MAX
from rose.errors import RoseError
from rose.verify.engine_lab import EngineLab
from rose.verify.kit_results import ENTRIES_MAX, KitCheck, KitFigure, KitSettings, Outcome, StepResult


class NotApplicable(RoseError):
    """The reason for which a step cannot say anything here, found while it ran; no failure."""


@dataclass(slots=True)
class StepFindings:
    """What one step has found so far."""

    checks: list[KitCheck] = field(default_factory=list)
    figures: list[KitFigure] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check(self, name: str, is_ok: bool, seen: str = "") -> None:
        self.checks.append(KitCheck(_short(name), bool(is_ok), _clipped(seen)))

    def figure(
        self,
        name: str,
        value: float | None,
        unit: str = "",
        n: int | None = None,
        interval: tuple[float | None, float | None] = (None, None),
    ) -> None:
        self.figures.append(KitFigure(_short(name), value, unit, n, *interval))

    def found(self, name: str) -> KitFigure | None:
        """Return a figure by its name."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def fact(self, name: str, value: object) -> None:
        self.facts[_short(name)] = _clipped(str(value))

    def note(self, text: str) -> None:
        self.notes.append(_clipped(text))

    def result(self, step: str, seconds: float, error: BaseException | None = None) -> StepResult:
        """Return the result of a step that took so long, and ended with this error if any."""
        outcome: Outcome = "passed"
        reason = ""
        if error is not None:
            outcome, reason = "not run" if isinstance(error, NotApplicable) else "failed", _words_of(error)
        elif failed := [check for check in self.checks if not check.is_ok]:
            outcome = "failed"
            reason = "; ".join(f"{check.name}: {check.seen}" if check.seen else check.name for check in failed)
        return StepResult(
            step,
            outcome,
            _clipped(reason),
            round(seconds, 3),
            tuple(self.checks[:ENTRIES_MAX]),
            tuple(self.figures[:ENTRIES_MAX]),
            dict(list(self.facts.items())[:ENTRIES_MAX]),
            tuple(self.notes[:ENTRIES_MAX]),
        )


@dataclass(slots=True)
class StepContext:
    """One step under way: its settings, the engines, what earlier steps found, and a way to tell of progress."""

    settings: KitSettings
    folder: Path
    lab: EngineLab
    results: Mapping[str, StepResult]
    say: Callable[[str], None]
    findings: StepFindings = field(default_factory=StepFindings)
    began_s: float = field(default_factory=time.monotonic)

    def earlier(self, step: str, figure: str) -> KitFigure | None:
        """Return a figure of an earlier step that was run."""
        result = self.results.get(step)
        return result.figure(figure) if result is not None else None


def _words_of(error: BaseException) -> str:
    return error.what if isinstance(error, RoseError) else f"{type(error).__name__}: {error}"


def _short(name: str) -> str:
    return name[:NAME_CHARACTERS_MAX]


def _clipped(text: str) -> str:
    """Return the text without its middle if it is too long: logs say most at both ends."""
    half = TEXT_CHARACTERS_MAX // 2 - 8
    return text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:half]}\n[...]\n{text[-half:]}"
