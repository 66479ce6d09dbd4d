"""Rows of the corpus: requests that once showed a defect, and are replayed by the quick tests ever since.

A row is a JSON file: the listener, what was found, and the steps. The steps of `workers` are the frames of one worker.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.run import Finding, Listener, Run
from tests.fuzz.servers import Server
from tests.fuzz.steps import Step
from tests.fuzz.worker_listener import replay_frames

FOLDER = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Row:
    name: str
    listener: str
    what: str
    steps: tuple[Step, ...]


def write(listener: str, finding: Finding, folder: Path | None = None) -> Path:
    """Keep a finding as a row, in a temporary folder unless one is given."""
    folder = folder if folder is not None else Path(tempfile.gettempdir()) / "rose-fuzz-rows"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{listener}-{finding.name}.json"
    steps = [step.to_json() for step in finding.steps]
    path.write_text(json.dumps({"listener": listener, "what": finding.signature, "steps": steps}, indent=1) + "\n")
    return path


def read(path: Path) -> Row:
    row = json.loads(path.read_text(encoding="utf-8"))
    steps = tuple(Step.from_json(step) for step in row["steps"])
    return Row(path.stem, row["listener"], row["what"], steps)


def rows() -> list[Row]:
    return [read(path) for path in sorted(FOLDER.glob("*.json"))]


async def problems(row: Row, listener: Listener, server: Server) -> list[Finding]:
    """Play a row; return what did not hold."""
    run = Run(listener, server, "replay", 0.0)
    run.check_log(None, ())  # what is in the log already
    run.findings.clear()
    pids, known = server.pids(), len(server.blocks())
    if row.listener == "workers":
        await replay_frames([step.body for step in row.steps], server)
    else:
        await run.replay(row.steps)
    await asyncio.sleep(0.5)
    run.check_log(None, ())
    run.check_processes(pids)
    problem = await run.honest_again()
    if problem is not None:
        run.note(Finding("honest client afterwards", problem))
    for block in server.blocks()[known:]:
        run.note(Finding("loop blocked", f"{block.blocked_ms:.0f} ms\n" + "\n".join(block.stack)))
    return list(run.findings.values())
