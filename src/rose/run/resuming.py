"""Resuming a run that was killed: same settings, its newest whole checkpoint, its own folder.

What a run does next depends on the weights and the optimiser's state, on how many groups were drawn so far, on which of
them no step has learnt from, and on the number of the version that workers run. All of that is in a checkpoint, and
nothing else matters: maps and dice follow from the numbers of the group and its member. So steps behind the checkpoint
are played again, and with an engine that computes alike in every batch they come out the same, bit by bit.

The gateway begins with an empty ledger, so that no trajectory of a repeated step can come twice. The weights are
published again, in an epoch of their own, so that no worker takes what the killed trainer left half done.

The settings of a run may name code: an agent to import, an interpreter to start. A folder that another user owns or may
write to is believed only if the command line names the same code.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rose.config import yaml_text as text
from rose.config.loading import RESOLVED_NAME
from rose.envs.openai_agent import absolute_name
from rose.errors import ConfigError, ModelError
from rose.run.past_runs import METRICS, REPORT, SUMMARY, flattened
from rose.run.resume_filter import counted
from rose.run.run_folder import RunFolder, by_number, in_force
from rose.run.run_records import EvaluationRecord, FinishedRecord, ResumeRecord, RunRecord, of_kind, read_records
from rose.run.run_settings import RunSettings, load_run_settings
from rose.run.trajectory_ledger import Balance
from rose.train.checkpoint_state import read_state

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """State after `step` steps; the defaults are those of a new run."""

    step: int = 0
    version: int = 0
    epoch: int = 0  # of the weights: that of the trainer before
    next_group: int = 0
    outstanding: tuple[int, ...] = ()  # groups that were drawn and that no step has learnt from
    balance: Balance = field(default_factory=Balance)
    checkpoint: Path | None = None
    is_evaluated: bool = False  # the evaluation behind `step` was done

    def record(self) -> ResumeRecord:
        name = self.checkpoint.name if self.checkpoint is not None else None
        at_s = time.monotonic()
        return ResumeRecord(
            step=self.step, at_s=at_s, version=self.version, next_group=self.next_group, checkpoint=name
        )


def read_start(checkpoint: Path) -> ResumePoint:
    """Return where a checkpoint resumes. Raises ModelError unless it is whole."""
    extra = read_state(checkpoint).inner("extra")
    balance, next_group = extra.inner("balance"), extra.whole("next_group", minimum=0)
    outstanding = extra.get("outstanding", [])  # checkpoints of earlier versions have none
    if not isinstance(outstanding, list) or not all(
        type(group) is int and 0 <= group < next_group for group in outstanding
    ):
        raise extra.complaint("outstanding", f"must be a list of groups before {next_group}")
    return ResumePoint(
        step=extra.whole("run_step", minimum=0),
        version=extra.whole("version", minimum=0),
        epoch=extra.whole("epoch", minimum=0),
        next_group=next_group,
        outstanding=tuple(outstanding),
        balance=Balance(**{key: balance.whole(key, minimum=0) for key in asdict(Balance())}),
        checkpoint=checkpoint,
    )


CLUSTER_KEY = "cluster.address"  # a Ray cluster can run code in the processes that join it
CODE_SETTINGS = ("agent", "vllm_python")  # what they name is imported or started
MAY_DIFFER = ("steps", "train.ranks", "cluster.")  # beginnings of keys: a run may get more steps, and go on elsewhere
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
BROKEN = ".broken-"  # such a folder is neither counted nor pruned; the next resume deletes it


def settings_to_resume(path: Path, given: Path | None = None, overrides: Sequence[str] = ()) -> RunSettings:
    """Return the settings of the run. Those given beside them must be the same, but for `MAY_DIFFER`.

    Raises ConfigError.
    """
    if not (path / RESOLVED_NAME).is_file():
        hint = "name the folder of a run, as in rose run --resume runs/NAME; `rose runs ls` lists them"
        raise ConfigError(f"there is no run to go on with in {path}: it has no {RESOLVED_NAME}", hint=hint)
    _check_code(path, overrides)
    place = [text.as_override("name", path.name), text.as_override("runs", str(path.parent))]
    known = load_run_settings(path / RESOLVED_NAME, place)
    tree = text.read_file(given) if given is not None else None
    written = [text.as_override(key, value) for key, value in flattened(tree or {})]
    wanted = load_run_settings(path / RESOLVED_NAME, [*place, *written, *overrides])
    known, wanted = (in_force(found, found.name or path.name) for found in (known, wanted))
    _check_same(known, wanted)
    return wanted


def _check_code(path: Path, overrides: Sequence[str]) -> None:
    """Refuse to run code that only a folder names which another user could have written. Raises ConfigError.

    The code is allowed if the command line names it too.
    """
    tree = text.read_file(path / RESOLVED_NAME)
    named = {".".join(keys): value for keys, value in map(text.parse_override, overrides)}
    for key, code in _code_in(tree, named):
        given = named.get(key)
        if isinstance(given, str) and (given == code or absolute_name(given) == absolute_name(code)):
            continue
        if why := _not_ours(path) or _not_ours(path / RESOLVED_NAME):
            hint = f"if you trust it, name it yourself: rose run --resume {path} --set {text.as_override(key, code)}"
            what = f"the settings of the run in {path} name code to run ({key} is {code}), and {why}"
            raise ConfigError(what, hint=hint)


def _code_in(tree: object, named: dict[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the settings that would have code run, and are in force."""
    found = dict(flattened(tree)) if isinstance(tree, dict) else {}
    yield from ((key, code) for key in CODE_SETTINGS if isinstance(code := found.get(key), str))
    cluster = str(named.get(CLUSTER_KEY, found.get(CLUSTER_KEY, "auto")))
    if named.get("cluster.kind", found.get("cluster.kind")) == "ray" and cluster != "auto":
        yield CLUSTER_KEY, cluster


def _not_ours(path: Path) -> str:
    """Return why others may have written this, or nothing."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user (uid {status.st_uid})"
    return f"other users may write to {path}" if status.st_mode & WRITABLE_BY_OTHERS else ""


def _check_same(known: RunSettings, wanted: RunSettings) -> None:
    before, after = dict(flattened(asdict(known))), dict(flattened(asdict(wanted)))
    differing = [key for key in before | after if before.get(key) != after.get(key) and not key.startswith(MAY_DIFFER)]
    if differing:
        changes = "; ".join(f"{key} is {before.get(key, 'not set')}, not {after.get(key)}" for key in differing)
        hint = "leave them out; a run with other settings is another run: rose run --name NAME"
        raise ConfigError(f"a run goes on with the settings that it began with ({changes})", hint=hint)
    if wanted.steps < known.steps:
        what = f"the run was to have {known.steps} steps, and can have more, but not only {wanted.steps}"
        raise ConfigError(what, hint="leave out steps")


def is_finished(folder: Path, steps: int) -> bool:
    """Return whether a run has finished so many steps and has its report."""
    has_ended = any(record.step >= steps for record in of_kind(_records(folder), FinishedRecord))
    return has_ended and (folder / REPORT).is_file()


def start_of(folder: RunFolder) -> tuple[ResumePoint, list[str]]:
    """Return where the run resumes, and the lines to print. Broken checkpoints are renamed."""
    # Delete what belongs to the attempt before: half a checkpoint, the ledger, the figures.
    for leftover in folder.checkpoints.glob(".*") if folder.checkpoints.is_dir() else ():
        shutil.rmtree(leftover, ignore_errors=True)
    for part in folder.path.glob(f"{folder.ledger.name}*"):
        part.unlink(missing_ok=True)
    for name in (SUMMARY, REPORT):
        (folder.path / name).unlink(missing_ok=True)
    words = [f"{name} is left out: {why}" for name, why in _put_aside(folder.checkpoints)]
    found = _checkpoints(folder.checkpoints)
    start = read_start(found[-1]) if found else ResumePoint()
    evaluations = of_kind(_records(folder.path), EvaluationRecord)
    start = replace(start, is_evaluated=any(record.step == start.step for record in evaluations))
    if start.checkpoint is None:
        words.append("there is no checkpoint to go on from: the run begins again, with the same settings")
    else:
        words.append(f"going on after step {start.step}, from {start.checkpoint}")
    return start, words


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints by their steps, the newest last."""
    return sorted(folder.glob("step-*"), key=by_number) if folder.is_dir() else []


def _put_aside(folder: Path) -> Iterator[tuple[str, str]]:
    """Rename broken checkpoints, newest first, until one is whole: the run will need their names again."""
    for path in reversed(_checkpoints(folder)):
        try:
            read_start(path)
            return
        except ModelError as error:
            aside = path.with_name(BROKEN + path.name)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            yield path.name, error.what


def _records(folder: Path) -> list[RunRecord]:
    path = folder / METRICS
    return counted(read_records(path, is_lenient=True)) if path.exists() else []
