"""Fuzzes every listener of ROSE: `make fuzz`, or by hand

    python -m tests.fuzz [--listeners serving,gateway] [--seconds 60] [--seed 1] [--block-ms 50] [--json FILE]
    python -m tests.fuzz --replay tests/fuzz/corpus/ROW.json
    python -m tests.fuzz --decoders 60

A finding is printed with its seed and its request, and kept as a row: replay it, repair the defect, and leave the row
in the corpus, where the quick tests replay it. Ends with 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz import corpus, decoders
from tests.fuzz.run import Finding, Listener, Run, summary
from tests.fuzz.table import LISTENERS


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description="fuzz every listener of ROSE")
    parser.add_argument("--listeners", default=",".join(LISTENERS), help="names, separated by commas; empty for none")
    parser.add_argument("--seconds", type=float, default=60.0, help="per listener (60)")
    parser.add_argument("--seed", default="1", help="the same seed draws the same cases (1)")
    parser.add_argument("--block-ms", type=float, default=50.0, help="longest block of an event loop (50)")
    parser.add_argument("--decoders", type=float, default=None, metavar="S", help="seconds per decoder; 0 for none")
    parser.add_argument("--rows", type=Path, default=None, help="folder for rows of new findings")
    parser.add_argument("--replay", type=Path, default=None, metavar="ROW", help="play one row instead")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return replay(options.replay, options.block_ms)
    names = [name for name in options.listeners.split(",") if name]
    results = [fuzz(LISTENERS[name], options.seconds, options.seed, options.block_ms, options.rows) for name in names]
    seconds = options.seconds / 4 if options.decoders is None else options.decoders
    failed = decoders.run_all(seconds, options.seed) if seconds else []
    if options.json is not None:
        options.json.write_text(json.dumps({"listeners": results, "decoders": failed}, indent=1))
    return int(any(result["found"] for result in results) or bool(failed))


def fuzz(listener: Listener, seconds: float, seed: str, block_ms: float, rows: Path | None) -> dict[str, Any]:
    """Run one listener for so long; print and return what was found."""
    print(f"{listener.name}: {seconds:g} s, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="rose-fuzz-") as folder:
        with listener.server(Path(folder), block_ms) as server:
            run = Run(listener, server, seed, seconds)
            asyncio.run(run.whole())
            result = summary(run)
    result["found"] = [finding.signature for finding in run.findings.values()]
    for finding in run.findings.values():
        show(listener, finding, seed, rows)
    print(f"  {result['cases']} cases, {result['requests']} requests, {result['honest']} honest, "
          f"the slowest in {result['honest_slowest_s']:g} s, longest block {result['longest_block_ms']:g} ms, "
          f"memory {result['rss_warm_mb']} MB when warm, {result['rss_mb']} MB at the end, "
          f"{len(run.findings)} findings",
          flush=True)  # fmt: skip
    return result


def show(listener: Listener, finding: Finding, seed: str, rows: Path | None) -> None:
    print(f"  FINDING: {finding.signature}")
    print("    " + finding.detail[-1200:].replace("\n", "\n    "))
    if finding.number is not None:
        print(f"    case {finding.number} of seed {seed}")
    for step in finding.steps[-3:]:
        print(f"    {step.delivery}: {step.head[:200]!r} body of {len(step.body)} bytes {step.body[:300]!r}")
    if finding.steps:
        path = corpus.write(listener.name, finding, rows)
        print(f"    replay: python -m tests.fuzz --replay {path}")
    sys.stdout.flush()


def replay(path: Path, block_ms: float) -> int:
    """Play one row against a fresh server; print what did not hold."""
    row = corpus.read(path)
    with tempfile.TemporaryDirectory(prefix="rose-fuzz-") as folder:
        with LISTENERS[row.listener].server(Path(folder), block_ms) as server:
            found = asyncio.run(corpus.problems(row, LISTENERS[row.listener], server))
    for finding in found:
        print(f"FINDING: {finding.signature}\n{finding.detail}")
    print("nothing was found" if not found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
