"""Going on with a run that was killed: under the same settings, from its newest whole checkpoint, in its own folder.

What a run does next depends on the weights and the optimiser's state, on how many groups were drawn so far, on which
of them no step has learnt from, and on the number of the version that workers run. All of that is in a checkpoint, and
nothing else matters: maps and dice follow from the numbers of the group and its member. So steps behind the checkpoint
are played anew, and with an engine that computes alike in every batch they come out the same, bit by bit.

Nothing that was under way is kept. The gateway begins with an empty ledger, so that no trajectory of a step that is
played anew can come twice; the weights are published anew, in an epoch of their own, so that nobody takes what the
killed trainer left half done.

The settings of a run may name code: an agent to import, an interpreter to start. A folder that another user owns or may
write to is believed only if the command line names the same code.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rose.config import text
from rose.config.load import RESOLVED_NAME
from rose.envs.agents import lasting_name
from rose.errors import ConfigError, ModelError
from rose.launch.folder import RunFolder, by_number, in_force
from rose.launch.past_runs import METRICS, REPORT, SUMMARY, flattened
from rose.launch.settings import RunSettings, load_run_settings
from rose.launch.start import Start, read_start
from rose.launch.summing_up import read_lines
from rose.launch.superseding import counted

CODE_SETTINGS = ("agent", "vllm_python")  # what they name is imported or started
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
BROKEN = ".broken-"
"""What is named so is neither counted nor pruned; the next resume takes it away."""


def settings_to_resume(path: Path, given: Path | None = None, overrides: Sequence[str] = ()) -> RunSettings:
    """Those of the run. What is given beside them must say the same; only `steps` may grow. Raises ConfigError."""
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
    for key in CODE_SETTINGS:
        code = tree.get(key) if isinstance(tree, dict) else None
        if not isinstance(code, str) or _is_same_code(code, named.get(key)):
            continue
        if why := _not_ours(path) or _not_ours(path / RESOLVED_NAME):
            hint = f"if you trust it, name it yourself: rose run --resume {path} --set {text.as_override(key, code)}"
            what = f"the settings of the run in {path} name code to run ({key} is {code}), and {why}"
            raise ConfigError(what, hint=hint)


def _is_same_code(code: str, named: object) -> bool:
    return isinstance(named, str) and lasting_name(named) == lasting_name(code)


def _not_ours(path: Path) -> str:
    """Return why others may have written this, or nothing."""
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user (uid {status.st_uid})"
    return f"other users may write to {path}" if status.st_mode & WRITABLE_BY_OTHERS else ""


def _check_same(known: RunSettings, wanted: RunSettings) -> None:
    before, after = dict(flattened(asdict(known))), dict(flattened(asdict(wanted)))
    differing = [key for key in before | after if before.get(key) != after.get(key) and key != "steps"]
    if differing:
        told = "; ".join(f"{key} is {before.get(key, 'not set')}, not {after.get(key)}" for key in differing)
        hint = "leave them out; a run with other settings is another run: rose run --name NAME"
        raise ConfigError(f"a run goes on with the settings that it began with ({told})", hint=hint)
    if wanted.steps < known.steps:
        what = f"the run was to have {known.steps} steps, and can have more, but not only {wanted.steps}"
        raise ConfigError(what, hint="leave out steps")


def is_finished(folder: Path, steps: int) -> bool:
    """Whether a run came to its end, had so many steps, and has been summed up."""
    has_ended = any(line["kind"] == "finished" and line["step"] >= steps for line in _lines(folder))
    return has_ended and (folder / REPORT).is_file()


def start_of(folder: RunFolder) -> tuple[Start, list[str]]:
    """Where the run goes on, and what to tell people. What stood in the way is put aside."""
    _clean(folder)
    words = [f"{name} is left out: {why}" for name, why in _put_aside(folder.checkpoints)]
    found = _checkpoints(folder.checkpoints)
    start = read_start(found[-1]) if found else Start()
    start = replace(start, is_evaluated=_is_evaluated(folder.path, start.step))
    if start.checkpoint is None:
        words.append("there is no checkpoint to go on from: the run begins again, with the same settings")
    else:
        words.append(f"going on after step {start.step}, from {start.checkpoint}")
    return start, words


def _checkpoints(folder: Path) -> list[Path]:
    """By their steps, the newest last."""
    return sorted(folder.glob("step-*"), key=by_number) if folder.is_dir() else []


def _put_aside(folder: Path) -> Iterator[tuple[str, str]]:
    """The newest checkpoints, down to one that is whole; their names must be free when the run gets there again."""
    for path in reversed(_checkpoints(folder)):
        try:
            read_start(path)
            return
        except ModelError as error:
            aside = path.with_name(BROKEN + path.name)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            yield path.name, error.what


def _is_evaluated(folder: Path, step: int) -> bool:
    return any(line["kind"] == "evaluation" and line["step"] == step for line in _lines(folder))


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / METRICS
    found = read_lines(path) if path.exists() else []
    return counted([line for line in found if isinstance(line, dict) and "kind" in line])


def _clean(folder: RunFolder) -> None:
    """Away with what belongs to the attempt before: half a checkpoint, the ledger, the figures."""
    for leftover in folder.checkpoints.glob(".*") if folder.checkpoints.is_dir() else ():
        shutil.rmtree(leftover, ignore_errors=True)
    for part in folder.path.glob(f"{folder.ledger.name}*"):
        part.unlink(missing_ok=True)
    for name in (SUMMARY, REPORT):
        (folder.path / name).unlink(missing_ok=True)
