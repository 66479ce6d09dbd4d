"""How fast the embedded engine decodes on one core, against transformers and vLLM's CPU build.

Prompts of 128 tokens, 128 new ones, greedy, end of text ignored; only the decode phase counts. Every competitor runs in
its own process with its model loaded; they take turns, batch by batch, and a ratio compares two turns of one round.
`bare GEMMs` are all linear layers of a step, by the faster of plain and prepacked float32; `model_time` is the engine's
own computation without planning, sampling and bookkeeping. `batch_invariant_cost` is what the engine's fixed order of
summation costs: the time of its matrix products over that of the bare GEMMs, less one (negative: it is faster);
`differing_token_rate` is the share of sampled tokens that differ between a request alone and in the batch.

vLLM needs `make venv-vllm` once; without it its column is null.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

MODELS = ("qwen3-3m", "qwen3-25m")
BATCHES = (1, 4, 16, 64)
COLUMNS = (
    "model", "batch", "engine_tok_s", "transformers_tok_s", "vllm_tok_s", "ratio_transformers", "ratio_vllm",
    "model_time_over_bare_gemms", "bookkeeping_share", "batch_invariant_cost", "differing_token_rate",
)  # fmt: skip
WANTED = (
    ("qwen3-3m", "ratio_transformers", 3.0, False),
    ("qwen3-3m", "ratio_vllm", 2.0, False),
    ("qwen3-25m", "ratio_transformers", 1.0, False),
    ("qwen3-25m", "ratio_vllm", 1.0, False),
    ("qwen3-25m", "model_time_over_bare_gemms", 1.25, True),
    ("qwen3-25m", "bookkeeping_share", 0.15, True),
)
COMPETITORS = Path(__file__).parent / "competitors"


class Competitor:
    """A child process that measures when asked."""

    def __init__(self, python: str, script: str, model: Path, core: int) -> None:
        self._process = subprocess.Popen(
            [python, str(COMPETITORS / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, bufsize=1,
        )  # fmt: skip
        self.ask({"model": str(model), "core": core})

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}; run it by hand to see why")
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)


def measure_model(name: str, folder: Path, arguments: Any) -> list[dict[str, Any]]:
    print(f"{name}: loading", flush=True)
    competitors = {
        "engine": Competitor(sys.executable, "with_rose.py", folder, arguments.core),
        "transformers": Competitor(sys.executable, "with_transformers.py", folder, arguments.core),
    }
    if Path(arguments.vllm_python).exists():
        competitors["vllm"] = Competitor(arguments.vllm_python, "with_vllm.py", folder, arguments.core)
    rows = [measure_batch(name, batch, competitors, arguments) for batch in arguments.batches]
    for competitor in competitors.values():
        competitor.close()
    return rows


def measure_batch(name: str, batch: int, competitors: dict[str, Competitor], arguments: Any) -> dict[str, Any]:
    order = {"what": "decode", "batch": batch, "prompt_tokens": 128, "new_tokens": 32 if arguments.quick else 128}
    names = list(competitors)
    rounds: list[dict[str, Any]] = []
    for number in range(-1, arguments.repeats):
        turn = {}
        for who in names[number % len(names) :] + names[: number % len(names)]:
            turn[who] = competitors[who].ask({**order, "seed": arguments.seed + number + 1})
        turn["bare"] = competitors["transformers"].ask({"what": "bare", "batch": batch})
        products = {"what": "products", "batch": batch, "linears": turn["bare"]["linears"]}
        turn["products"] = competitors["engine"].ask(products)
        if number >= 0:  # the first round warms caches and compilers
            rounds.append(turn)
        print(f"\r{name} batch {batch}: round {number + 1} of {arguments.repeats}", end="", flush=True)
    print()
    differing = competitors["engine"].ask({**order, "what": "differing", "seed": arguments.seed})
    return {**summarise(name, batch, rounds), "differing_token_rate": differing["differing"] / differing["tokens"]}


def summarise(name: str, batch: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "batch": batch}
    for who in ("engine", "transformers", "vllm"):
        found = [turn[who]["tok_s"] for turn in rounds if who in turn]
        row[f"{who}_tok_s"] = round(harness.median_and_spread(found)[0], 1) if found else None
        if found and who != "engine":
            ratios = [turn["engine"]["tok_s"] / turn[who]["tok_s"] for turn in rounds]
            harness.put_ratio(row, f"ratio_{who}", ratios)
    if row["vllm_tok_s"] is None:
        row["ratio_vllm"], row["vllm_reason"] = None, "no environment with vLLM: run `make venv-vllm`"
    model_over_bare = [turn["engine"]["model_s"] / turn["bare"]["bare_s"] for turn in rounds]
    harness.put_ratio(row, "model_time_over_bare_gemms", model_over_bare)
    cost = [turn["products"]["products_s"] / turn["bare"]["bare_s"] - 1 for turn in rounds]
    harness.put_ratio(row, "batch_invariant_cost", cost)
    harness.put_ratio(row, "bookkeeping_share", [1 - t["engine"]["model_s"] / t["engine"]["step_s"] for t in rounds])
    return row


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is wanted at batch 16, of what was measured."""
    at = {row["model"]: row for row in rows if row["batch"] == 16}
    return [
        harness.wanted(f"{model}, batch 16: {key}", at[model][key], bar, at_most=at_most)
        for model, key, bar, at_most in WANTED
        if model in at and at[model][key] is not None
    ]


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--repeats", type=int, default=None, help="rounds per batch (5, or 2 with --quick)")
    parser.add_argument("--vllm-python", default=str(harness.PROJECT / ".venv-vllm" / "bin" / "python"))
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (2 if arguments.quick else 5)
    begun = harness.machine()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        from rose.models.presets import write_preset

        for name in arguments.models:
            write_preset(name, Path(place) / name, seed=arguments.seed)
            rows += measure_model(name, Path(place) / name, arguments)
    harness.print_table(rows, COLUMNS)
    return harness.finish(arguments, "engine", rows, bars(rows), begun)


if __name__ == "__main__":
    raise SystemExit(main())
