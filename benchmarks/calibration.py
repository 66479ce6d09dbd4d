"""How far the forecast of a lent device is off: predicted from a recorded profile, against the same device measured.

    python benchmarks/calibration.py --json FILE

Each repeat has two parts on one live `rose serve --lend`, under open-loop requests and a closed loop of 32 rollout
trajectories. Beside the first, `rose profile --record` writes both step profiles. The second part has other requests;
`rose.sim.device_forecast` predicts it from the profiles, without having seen it. Errors are predicted over measured,
less one. `client` latencies are those of the load generator, with HTTP, which is not simulated; `engine` ones are the
device's own, over its last requests, of both parts. The device has one core and everything else the others: a machine
that others use shows in `foreign`, their share of the device's core, and in every error.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from coserving.devices import LENT_TOKENS, Device, Site, Terms
from coserving.rollouts import Order as RolloutOrder
from coserving.rollouts import Rollouts
from coserving.sending import Sent, order_of, record_of, send
from coserving.traffic import scaled

from rose.core.slo import Budgets
from rose.load.generators import generated
from rose.load.load_report import LatencyBudget, measure, seen
from rose.load.statistics import percentile
from rose.load.traces import Trace
from rose.models.presets import write_preset
from rose.sim.device_forecast import forecast
from rose.sim.shapes import Arrival

TTFT_MS, TPOT_MS = 500.0, 150.0
CONTEXT_TOKENS = 4096
RATE = 4.0  # requests a second: a third of what the device could serve, alone and undisturbed
LENT_SECONDS = "rose_lent_seconds_total"
WARM_S = 3.0  # of a part, before its figures begin
THROUGHPUT_ERROR, P99_ERROR = 0.05, 0.10
QUANTITIES = (
    "rollout_tokens_s", "lent_share", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
    "engine_ttft_p50_ms", "engine_ttft_p99_ms", "engine_tpot_p50_ms", "engine_tpot_p99_ms",
)  # fmt: skip
COLUMNS = ("repeat", "quantity", "n", "measured", "predicted", "error")


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of live traffic: what was sent, and what the device counted meanwhile."""

    sent: Sent
    lent_s: float
    tokens: float
    engine: dict[str, float]


def part_of(device: Device, trace: Trace, seed: int, folder: Path) -> Part:
    before = device.counters()
    sent = send(order_of(trace, f"{device.url}", seed, Site(device, device).cores()), folder)
    after = device.counters()
    lent_s, tokens = (after[name] - before.get(name, 0.0) for name in (LENT_SECONDS, LENT_TOKENS))
    return Part(sent, lent_s, tokens, serving_times(device))


def serving_times(device: Device) -> dict[str, float]:
    request = urllib.request.Request(
        f"{device.url}/rose/lending", headers={"Authorization": f"Bearer {device.owner_token}"}
    )
    with urllib.request.urlopen(request, timeout=15) as response:
        times: dict[str, float] = json.load(response)["serving"]
    return times


def record(device: Device, paths: tuple[Path, Path]) -> str:
    """Run `rose profile --record` beside the device, and return what it says of the fit."""
    command = [sys.executable, "-m", "rose", "profile", "--url", f"{device.url}"]
    command += ["--record", str(paths[0]), "--rollout-record", str(paths[1])]
    environment = os.environ | {"ROSE_OWNER_TOKEN": device.owner_token}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"rose profile failed: {done.stderr}")
    return str(json.loads(paths[0].read_text())["source"]["measured"])


def measured_of(part: Part) -> dict[str, float]:
    records = [record_of(row) for row in part.sent.rows if row.scheduled_s >= WARM_S]
    measures = measure(records, LatencyBudget())
    found = {"rollout_tokens_s": part.tokens / part.sent.duration_s, "lent_share": part.lent_s / part.sent.duration_s}
    for name, values in (("ttft", measures.ttft_s), ("tpot", measures.tpot_s)):
        for share in (50, 99):
            found[f"{name}_p{share}_ms"] = 1000 * percentile(seen(values), share)
            found[f"engine_{name}_p{share}_ms"] = 1000 * part.engine[f"{name}_p{share}_s"]
    return found


def predicted_of(paths: tuple[Path, Path], trace: Trace, seconds: float, seed: int) -> dict[str, float]:
    columns = zip(trace.arrival_s, trace.prompt_tokens, trace.output_tokens, strict=True)
    requests = [Arrival(float(at_s), int(prompt), int(output)) for at_s, prompt, output in columns]
    budgets = Budgets(TTFT_MS / 1000, TPOT_MS / 1000, answer_s=600.0)
    found = forecast(*paths, requests, budgets, seconds=seconds, warm_s=WARM_S, seed=seed)
    latencies = {
        f"{prefix}{name}_ms": 1000 * getattr(found, f"{name}_s")
        for prefix in ("", "engine_")
        for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
    }
    return {"rollout_tokens_s": found.rollout_tokens_s, "lent_share": found.lent_share} | latencies


def traffic(seconds: float, seed: int) -> Trace:
    return scaled(generated(f"poisson:rate={RATE:g}", seed=seed, duration_s=seconds), CONTEXT_TOKENS)


def repeat_rows(device: Device, seconds: float, repeat: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    first, second = (traffic(seconds, 2 * (seed + repeat) + part) for part in (0, 1))
    rollouts = Rollouts(RolloutOrder(f"{device.rollout_url}", device.token, seed + repeat), folder)
    paths = folder / f"serving-{repeat}.json", folder / f"rollout-{repeat}.json"
    try:
        rollouts.wait_until_running()
        part_of(device, first, seed, folder)
        fit = record(device, paths)
        part = part_of(device, second, seed + 1, folder)
    finally:
        rollouts.stop()
    measured, predicted = measured_of(part), predicted_of(paths, second, seconds, seed + repeat)
    shares = part.sent.shares
    count = int(np.sum(second.arrival_s >= WARM_S))
    return [
        {
            "repeat": repeat, "quantity": name, "n": count, "measured": round(measured[name], 4),
            "predicted": round(predicted[name], 4), "error": round(predicted[name] / measured[name] - 1, 4),
            "foreign": shares.foreign, "fit": fit,
        }
        for name in QUANTITIES
    ]  # fmt: skip


def errors_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median error of every quantity over repeats."""
    return {name: statistics.median(row["error"] for row in rows if row["quantity"] == name) for name in QUANTITIES}


def bars_of(errors: dict[str, float]) -> list[dict[str, Any]]:
    limits = {"rollout_tokens_s": THROUGHPUT_ERROR, "ttft_p99_ms": P99_ERROR, "tpot_p99_ms": P99_ERROR}
    return [
        harness.wanted(f"median error of {name}", abs(errors[name]), limit, at_most=True)
        for name, limit in limits.items()
    ]


def main() -> int:
    arguments = harness.parser(__doc__ or "").parse_args()
    repeats, seconds = (1, 12.0) if arguments.quick else (3, 30.0)
    begun, rows = harness.machine(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serving, rollout = (write_preset(preset, folder / preset, seed=0) for preset in ("qwen3-3m", "frozenlake-1m"))
        device = Device(Terms(serving, rollout, "decode", TTFT_MS, TPOT_MS), folder / "device.log")
        try:
            for repeat in range(repeats):
                rows += repeat_rows(device, seconds, repeat, arguments.seed, folder)
        finally:
            device.close()
    harness.print_table(rows, COLUMNS)
    errors = errors_of(rows)
    print("\nmedian errors: " + ", ".join(f"{name} {error:+.1%}" for name, error in errors.items()))
    print(f"others had {statistics.median(row['foreign'] for row in rows):.0%} of the device's core")
    return harness.finish(arguments, "calibration", rows, bars_of(errors), begun, errors=errors)


if __name__ == "__main__":
    raise SystemExit(main())
