"""What a Ray cluster costs a run: `rose run` on this machine and on Ray, in turns, with the same settings and weights.

The cluster is a head and three nodes of this machine, each in a network namespace (tests/integration/ray_nodes.py), so
both launchers have the same cores. `start_s` is from the command until rollouts begin, with models in the cache;
`step_s` is the median of the steps after the first two. In a run with a kill, the dedicated worker is killed locally,
and the raylet of its node on Ray; `back_s` is until its death is told locally, and until it is ready again on Ray. No
trajectory may be lost or doubled.

It needs Ray: make venv-ray, then .venv-ray/bin/python benchmarks/cluster.py --json FILE
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(harness.PROJECT))

from tests.integration.devices import eventually
from tests.integration.ray_nodes import PATIENCE_S, RayNodes, driver_on
from tests.integration.running import Run, kill, processes_of

from rose.train.warmstart import warm_start

COLUMNS = ("where", "repeat", "killed", "start_s", "step_s", "back_s", "steps", "lost", "doubled", "hash")
LABELS = ("control", "serving", "dedicated", "any")
FIRST_STEPS = 2  # caches and the first full batch
JOB = ("groups.groups=4", "groups.size=8", "evaluation.every_steps=0", "checkpoint.every_steps=0")
START_S_MAX, STEP_RATIO_MAX = 20.0, 1.03
WAIT_S = 900.0


def begun(nodes: RayNodes | None, folder: Path, model: Path, steps: int) -> Run:
    job = (*JOB, f"steps={steps}")
    if nodes is None:
        return Run(folder, model, *job)
    return driver_on(nodes)(folder, model, "cluster.kind=ray", f"cluster.address={nodes.head}", *job)


def killed(run: Run, nodes: RayNodes | None) -> float:
    """Kill the dedicated worker or its node, and return the seconds until it is started again."""
    if nodes is None:
        [process_id] = processes_of(run.processes(), "rose serve .*--worker-name dedicated")
        kill(process_id)
    else:
        kill(nodes.raylet_of("dedicated"))
    began_s = time.monotonic()
    back = "dedicated died" if nodes is None else "dedicated is on .* now"
    eventually(lambda: run.has_said(back) or run.process.poll() is not None, PATIENCE_S)
    return time.monotonic() - began_s


def measured(nodes: RayNodes | None, model: Path, steps: int, repeat: int, *, has_kill: bool) -> dict[str, Any]:
    """Return the row of one run."""
    row: dict[str, Any] = {"where": "ray" if nodes else "local", "repeat": repeat, "killed": has_kill, "back_s": None}
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        run = begun(nodes, Path(folder), model, steps)
        try:
            run.until_said("ready: users are served")
            row["start_s"] = time.monotonic() - began_s
            if has_kill:
                run.until_said(rf"step +{FIRST_STEPS + 1}/")
                row["back_s"] = killed(run, nodes)
            assert run.wait(WAIT_S) == 0, run.words
        finally:
            run.end()
        lines, summary = run.metrics("step"), run.summary()
    row["step_s"] = statistics.median(line["step_s"] for line in lines[FIRST_STEPS:])
    row |= {"steps": summary["steps"], "lost": summary["lost"], "doubled": summary["doubled"]}
    return row | {"hash": lines[-1]["weights_hash"]}


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    whole = [row for row in rows if not row["killed"]]
    pairs = [[row for row in whole if row["repeat"] == repeat] for repeat in {row["repeat"] for row in whole}]
    by_place = [{row["where"]: row for row in pair} for pair in pairs]
    start_s = statistics.median(pair["ray"]["start_s"] - pair["local"]["start_s"] for pair in by_place)
    ratio = statistics.median(pair["ray"]["step_s"] / pair["local"]["step_s"] for pair in by_place)
    wrong = sum(row["lost"] + row["doubled"] for row in rows)
    return [
        harness.wanted("start-up on Ray beyond the local launcher's, s", start_s, START_S_MAX, at_most=True),
        harness.wanted("step time on Ray over local", ratio, STEP_RATIO_MAX, at_most=True),
        harness.wanted("trajectories lost or doubled, with kills", wrong, 0, at_most=True),
        harness.wanted("different weights at the end", len({row["hash"] for row in rows}) - 1, 0, at_most=True),
    ]


def main() -> int:
    arguments = harness.parser(__doc__ or "").parse_args()
    repeats, steps = (1, 15) if arguments.quick else (5, 40)
    machine, rows = harness.machine(), []
    model = warm_start("frozenlake")
    nodes = RayNodes()
    try:
        nodes.open()
        for role in LABELS:
            nodes.add(f"rose/role={role}")
        for repeat in range(repeats):
            places = (None, nodes) if repeat % 2 == 0 else (nodes, None)
            rows += [measured(place, model, steps, repeat, has_kill=False) for place in places]
        rows += [measured(place, model, steps, repeats, has_kill=True) for place in (None, nodes)]
    finally:
        nodes.close()
    harness.print_table(rows, COLUMNS)
    return harness.finish(arguments, "cluster", rows, bars(rows), machine, namespaces=nodes.has_namespaces)


if __name__ == "__main__":
    raise SystemExit(main())
