"""Takes security and durability checks out, one by one, and sees whether a test notices: `make mutants`.

    python -m tests.mutants [--only TEXT] [--processes 2] [--list] [--json FILE]

Each mutant is made in a temporary copy of the sources and tests. Ends with 1 if a mutant survives, if the test that
notices it fails without the mutant too, or if its text is not in its file exactly once. Tests that a row names and that
do not exist are skipped; a row needs at least one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PROCESSES = 2
MUTANT_S = 900  # a mutant that makes a test hang is caught by the tests' own timeout long before
TEST_S = 60
FAILED, NONE_COLLECTED = 1, 5  # exit codes of pytest


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    word: str  # caught, survived, or what is wrong with the row
    detail: str = ""

    @property
    def is_good(self) -> bool:
        return self.word == "caught"


def problem_of(mutant: Mutant, root: Path = ROOT) -> str:
    """Return what is wrong with a row, or nothing."""
    path = root / "src" / "rose" / mutant.file
    if not path.exists():
        return f"there is no file {mutant.file}"
    count = path.read_text(encoding="utf-8").count(mutant.old)
    if count != 1:
        return f"its text is {count} times in {mutant.file}, not once"
    return "" if _tests(mutant, root) else "none of its tests exists"


def judge(mutant: Mutant) -> Verdict:
    """Make the mutant and run its tests."""
    if problem := problem_of(mutant):
        return Verdict(mutant, "bad row", problem)
    with tempfile.TemporaryDirectory(prefix="rose-mutant-") as folder:
        copy = Path(folder) / "tree"
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "docs", "examples", "benchmarks"):
            if (ROOT / name).exists():
                (copy / name).symlink_to(ROOT / name)
        path = copy / "src" / "rose" / mutant.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        return _run(mutant, copy)


def _run(mutant: Mutant, copy: Path) -> Verdict:
    arguments = [*(["-k", mutant.only] if mutant.only else []), *_tests(mutant, copy)]
    try:
        ended = _pytest(copy, arguments)
    except subprocess.TimeoutExpired:
        return Verdict(mutant, "caught", "its tests do not end")
    last = next((line for line in ended.stdout.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))), "")
    if ended.returncode == FAILED:
        test = last.partition(" ")[2].partition(" - ")[0]
        if test and _pytest(ROOT, [test]).returncode:
            return Verdict(mutant, "bad row", f"fails without the mutant too: {test}")
        return Verdict(mutant, "caught", last[:150])
    if ended.returncode == 0:
        return Verdict(mutant, "survived", ended.stdout.strip().rsplit("\n", 1)[-1])
    return Verdict(
        mutant, "bad row", f"pytest ended with {ended.returncode}: {ended.stdout[-300:]}{ended.stderr[-300:]}"
    )


def _pytest(root: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    marks = "not slow and not vllm and not sglang"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marks, f"--timeout={TEST_S}"]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]), "CI": "true"}
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=root,
        env=variables,
        capture_output=True,
        text=True,
        timeout=MUTANT_S,
    )


def _tests(mutant: Mutant, root: Path) -> list[str]:
    return [f"tests/{name}" for name in mutant.tests if (root / "tests" / name.partition("::")[0]).exists()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants", description="see whether tests notice missing checks")
    parser.add_argument("--only", default="", help="mutants whose name or file has this text")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--list", action="store_true", help="check the rows only")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name or options.only in mutant.file]
    if options.list:
        problems = {mutant.name: problem for mutant in chosen if (problem := problem_of(mutant))}
        print("\n".join(f"{name}: {problem}" for name, problem in problems.items()) or f"{len(chosen)} rows are right")
        return int(bool(problems))
    verdicts = []
    with ThreadPoolExecutor(options.processes) as pool:
        for verdict in pool.map(judge, chosen):
            verdicts.append(verdict)
            print(f"{verdict.word:<9} {verdict.mutant.name}  {verdict.detail}", flush=True)
    caught = sum(verdict.is_good for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} mutants caught")
    if options.json is not None:
        rows = [{"name": v.mutant.name, "verdict": v.word, "detail": v.detail} for v in verdicts]
        options.json.write_text(json.dumps(rows, indent=1))
    return int(caught < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
