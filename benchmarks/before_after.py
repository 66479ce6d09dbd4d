"""What a change costs: this checkout against another one (`--before FOLDER`), in one run, taking turns.

Front: `rose serve` of both checkouts run side by side on a small model, and only one of them is asked at a time, round
after round. `front_cpu_us` is the CPU time of the front's process per request, which the machine's other work disturbs
least. Whole completions, streams of 32 tokens, and conversations.

Gateway: the benchmark of each checkout (`benchmarks/gateway.py --quick`), round after round.

    git worktree add ../before COMMIT && python benchmarks/before_after.py --before ../before
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import harness
from doors.processes import cpu_s

from rose.models.presets import write_preset

MODEL = "qwen3-3m"
COLUMNS = ("what", "n", "before", "after", "ratio", "ratio_low", "ratio_high")
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 1}),
    "stream": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32, "stream": True, "ignore_eos": True}),
    "conversation": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Tell me about roses. " * 8}], "max_tokens": 1},
    ),
}
GATEWAY_FIGURES = ("added_p50_ms", "control_cpu_ms_per_turn", "turns_s_max")


@dataclass
class Side:
    """One checkout, with a device of its own."""

    folder: Path
    process: subprocess.Popen[str]
    url: str

    def ask(self, path: str, body: dict[str, Any], count: int) -> float:
        """CPU time of the front per request, in microseconds, on one connection."""
        data, address = json.dumps({"model": MODEL} | body), urlsplit(self.url).netloc
        connection = http.client.HTTPConnection(address, timeout=60)
        before_s = cpu_s(self.process.pid)
        for _ in range(count):
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
            assert reply.status == 200, text
        connection.close()
        return (cpu_s(self.process.pid) - before_s) / count * 1e6


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--before", type=Path, required=True, metavar="FOLDER", help="the other checkout")
    options.add_argument("--rounds", type=int, default=None, help="of each side (front 12, gateway half as many)")
    arguments = options.parse_args()
    begun = harness.machine()
    before = arguments.before.resolve()
    rounds = arguments.rounds or (3 if arguments.quick else 12)
    with tempfile.TemporaryDirectory() as place:
        model = write_preset(MODEL, Path(place) / MODEL, seed=0)
        rows = _fronts(model, before, rounds, 50 if arguments.quick else 200)
    rows += _gateways(before, max(1, rounds // 2))
    harness.print_table(rows, COLUMNS)
    worst = {row["what"]: (1 / row["ratio"] if row["what"].endswith("_max") else row["ratio"]) for row in rows}
    bars = [
        harness.wanted(f"{what}, after / before", round(ratio, 3), 1.03, at_most=True) for what, ratio in worst.items()
    ]
    return harness.finish(arguments, "before_after", rows, bars, begun)


def _fronts(model: Path, before: Path, rounds: int, count: int) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in REQUESTS}
    with ExitStack() as held:
        sides = [_side(held, folder, model) for folder in (before, harness.PROJECT)]
        for side in sides:
            for path, body in REQUESTS.values():
                side.ask(path, body, count)  # so that both are warm
        for number in range(rounds):
            for name, (path, body) in REQUESTS.items():
                order = sides if number % 2 == 0 else sides[::-1]
                many = count if body.get("stream") else 5 * count  # the kernel counts in hundredths of a second
                took = {side.folder: side.ask(path, body, many) for side in order}
                found[name].append((took[before], took[harness.PROJECT]))
            print(f"front: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return [_row(f"{name}: front_cpu_us", pairs, rounds) for name, pairs in found.items()]


def _side(held: ExitStack, folder: Path, model: Path) -> Side:
    words = ["-m", "rose", "serve", str(model), "--device", "cpu:0", "--port", "0"]
    running = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "src")},
    )
    held.callback(running.wait)
    held.callback(running.send_signal, signal.SIGTERM)
    assert running.stdout is not None
    for line in running.stdout:
        if "http://" in line:
            address = next(word for word in line.split() if word.startswith("http://"))
            return Side(folder, running, address.rstrip(".,").removesuffix("/v1"))
    raise SystemExit(f"`rose serve` of {folder} did not start")


def _gateways(before: Path, rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in GATEWAY_FIGURES}
    for number in range(rounds):
        order = (before, harness.PROJECT) if number % 2 == 0 else (harness.PROJECT, before)
        figures = {folder: _gateway(folder) for folder in order}
        for name in GATEWAY_FIGURES:
            found[name].append((figures[before][name], figures[harness.PROJECT][name]))
        print(f"gateway: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return [_row(name, pairs, rounds) for name, pairs in found.items()]


def _gateway(folder: Path) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "benchmarks/gateway.py", "--quick", "--json", out.name]
        variables = os.environ | {"PYTHONPATH": str(folder / "src")}
        subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.DEVNULL, check=False)
        figures: dict[str, Any] = json.loads(Path(out.name).read_text())
    time.sleep(1)
    return figures


def _row(what: str, pairs: list[tuple[float, float]], count: int) -> dict[str, Any]:
    ratios = [after / before for before, after in pairs]
    row: dict[str, Any] = {"what": what, "n": count}
    row["before"] = round(statistics.median(before for before, _ in pairs), 2)
    row["after"] = round(statistics.median(after for _, after in pairs), 2)
    harness.put_ratio(row, "ratio", ratios)
    return row


if __name__ == "__main__":
    sys.exit(main())
