"""What a verification kit writes: settings, the result of every step, and the report that has all of them.

A result is written as soon as its step ends, to a file of its own, so that a killed kit loses at most one step. The
report is put together from these files and is meant to be attached to an issue. Every text in it passes through
`rose.verify.redaction` before it is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from rose.bounds import UNREADABLE, Count, Finite, Label, Name, NonNegative, Seconds, Text
from rose.errors import ConfigError
from rose.private_files import write_durable

LAYOUT = 1
REPORT_FILE, SETTINGS_FILE = "report.json", "settings.json"
STEPS_MAX = 64
ENTRIES_MAX = 256  # figures, checks, facts and notes of one step
FILE_BYTES_MAX = 16 << 20  # far above any report: 64 steps of 256 entries of 4 KiB are mostly empty

Outcome = Literal["passed", "failed", "not run"]


class KitSettings(msgspec.Struct, frozen=True):
    """The settings of a kit. A resumed kit must have the same."""

    device: Name = "cuda:0"
    serving: Text = ""  # a model folder or the name of a preset; empty takes a small preset
    rollout: Text = ""
    vllm_python: Text = ""
    requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000  # of every measured replay; P99 needs 1,000
    rate_rps: Annotated[float, Meta(gt=0, le=10_000)] = 12.0
    ttft_ms: Annotated[float, Meta(gt=0, le=1e6)] = 500.0
    tpot_ms: Annotated[float, Meta(gt=0, le=1e6)] = 150.0
    budget_minutes: Annotated[float, Meta(gt=0, le=1440)] = 30.0
    seed: Count = 0
    with_names: bool = False  # the host's name, the user's name and folders appear in the report

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("cpu")


class KitFigure(msgspec.Struct, frozen=True):
    """One measured value. `low` and `high` are its 95 % interval, from `n` observations."""

    name: Label
    value: Finite | None
    unit: Label = ""
    n: Count | None = None
    low: Finite | None = None
    high: Finite | None = None


class KitCheck(msgspec.Struct, frozen=True):
    """One statement that must hold, whether it held, and what was seen."""

    name: Label
    is_ok: bool
    seen: Text = ""


class StepResult(msgspec.Struct, frozen=True):
    """The result of one step. `reason` says why it failed or was not run."""

    step: Label
    outcome: Outcome
    reason: Text = ""
    seconds: Seconds = 0.0
    checks: Annotated[tuple[KitCheck, ...], Meta(max_length=ENTRIES_MAX)] = ()
    figures: Annotated[tuple[KitFigure, ...], Meta(max_length=ENTRIES_MAX)] = ()
    facts: Annotated[dict[Label, Text], Meta(max_length=ENTRIES_MAX)] = {}
    notes: Annotated[tuple[Text, ...], Meta(max_length=ENTRIES_MAX)] = ()

    def figure(self, name: str) -> KitFigure | None:
        return next((figure for figure in self.figures if figure.name == name), None)


class KitReport(msgspec.Struct, frozen=True):
    """Everything that a kit found, in the order of its steps."""

    rose: Label
    began: Label  # local date and time
    settings: KitSettings
    results: Annotated[tuple[StepResult, ...], Meta(max_length=STEPS_MAX)] = ()
    run_seconds: Seconds = 0.0  # in all sittings together
    ended: NonNegative = 0.0  # seconds since 1970; 0 while it runs or was interrupted
    layout: Count = LAYOUT

    def result(self, step: str) -> StepResult | None:
        return next((result for result in self.results if result.step == step), None)


Content = TypeVar("Content", bound=msgspec.Struct)


def write_json(path: Path, content: msgspec.Struct) -> None:
    """Replace a file by this content as indented JSON. Raises ConfigError if it cannot be written."""
    try:
        write_durable(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", hint="name another folder with --out"
        ) from error


def result_path(folder: Path, step: str) -> Path:
    """Return where a step's result is kept."""
    return folder / "steps" / f"{step}.json"


def read_result(path: Path) -> StepResult | None:
    """Return a step's result; None if there is none. Raises ConfigError for a file that is not one."""
    return _read(path, msgspec.json.Decoder(StepResult))


def read_report(path: Path) -> KitReport | None:
    """Return a report; None if there is none. Raises ConfigError for a file that is not one, or of another layout."""
    report: KitReport | None = _read(path, msgspec.json.Decoder(KitReport))
    if report is not None and report.layout != LAYOUT:
        raise ConfigError(f"{path} is a report of layout {report.layout}, this ROSE writes layout {LAYOUT}")
    return report


def _read(path: Path, decoder: Any) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return decoder.decode(content)
    except UNREADABLE as error:
        hint = "name another folder with --out, or remove this one"
        raise ConfigError(f"{path} was not written by this kit: {error}", hint=hint) from error
