"""A measurement in pieces: jobs that take minutes each, kept in a folder, so that no call has to run all of them.

With `--runs FOLDER` a job leaves its run there and, once it is over, its row beside it. A later call finds the row and
does not run the job again; a run without a row did not come to its end and is made anew. `--only` chooses among the
jobs by name, `--list` names them, and `--collect` takes what there is and runs nothing:

    benchmark --runs kept --only 'rollout-heavy-*-grpo-*'
    benchmark --runs kept --only 'rollout-heavy-*-dapo-*'
    benchmark --runs kept --collect --json FILE

A row says what was asked of its job. If a call asks for something else, other steps for example, it is refused: rows of
different jobs would look like one measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import harness

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep runs here; what is there is not run again")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these jobs; * stands for anything")
    parser.add_argument("--list", action="store_true", help="name the jobs and run nothing")
    parser.add_argument("--collect", action="store_true", help="only what --runs has already; run nothing")


def chosen(names: Sequence[str], only: Sequence[str] | None) -> list[str]:
    """In the order of the jobs. Ends the program with words if there is no such job."""
    if not only:
        return list(names)
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SystemExit(f"there is no job {pattern!r}\n  try: one of {', '.join(names)}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in only)]


@contextmanager
def kept_in(runs: Path | None) -> Iterator[Path]:
    """The folder that was named, or one that is gone afterwards."""
    if runs is None:
        with tempfile.TemporaryDirectory(prefix="rose-benchmark-") as place:
            yield Path(place)
    else:
        runs.mkdir(parents=True, exist_ok=True)
        yield runs


def rows_of(
    arguments: argparse.Namespace, asked: dict[str, list[str]], measure: Callable[[str, Path], Row]
) -> list[Row]:
    """One row per job that was chosen; `asked` has what is wanted of each, by its name."""
    if arguments.collect and arguments.runs is None:
        raise SystemExit("there is nothing to collect from\n  try: --collect --runs FOLDER")
    names = chosen(list(asked), arguments.only)
    rows = []
    with kept_in(arguments.runs) as runs:
        for number, name in enumerate(names, 1):
            row = row_before(runs, name, asked[name])
            if row is None and not arguments.collect:
                print(f"job {number} of {len(names)}: {name}", flush=True)
                row = _measured(runs, name, asked[name], measure)
            elif row is not None:
                print(f"job {number} of {len(names)}: {name}, measured {row['measured_at']}", flush=True)
            rows += [row] if row is not None else []
    if not rows:
        raise SystemExit(f"no job of these is in {arguments.runs}: {', '.join(names)}")
    return rows


def ran(command: Sequence[str]) -> None:
    """Ends the program with words if the command failed; what was measured before it is kept."""
    code = subprocess.run(command).returncode
    if code:
        shown = " ".join(shlex.quote(word) for word in command)
        raise SystemExit(f"a run ended with {code}; what it said is above\n  the command was: {shown}")


def row_before(runs: Path, name: str, asked: list[str]) -> Row | None:
    """What an earlier call has measured."""
    file = _file(runs, name)
    if not file.exists():
        return None
    found = json.loads(file.read_text())
    if found["asked"] != asked:
        other = [word for word in found["asked"] if word not in asked]
        wanted = [word for word in asked if word not in found["asked"]]
        was, now = (", ".join(words) or "nothing" for words in (other, wanted))
        raise SystemExit(f"{file} is of a job with {was}; asked for is {now}\n  try: another folder, or remove it")
    row: Row = found["row"]
    return row


def _measured(runs: Path, name: str, asked: list[str], measure: Callable[[str, Path], Row]) -> Row:
    shutil.rmtree(runs / name, ignore_errors=True)  # of a call that was stopped on the way
    begun, began_s = harness.machine(), time.monotonic()
    row = measure(name, runs)
    row |= {"job": name, "took_s": round(time.monotonic() - began_s, 1), "load_before": begun["load_before"]}
    row |= {"measured_at": time.strftime("%Y-%m-%d %H:%M")}
    file = _file(runs, name)
    half = file.with_suffix(".half")
    half.write_text(json.dumps({"asked": asked, "row": row}, indent=1) + "\n")
    os.replace(half, file)
    return row


def _file(runs: Path, name: str) -> Path:
    return runs / f"{name}.json"
