"""What can be asked of benchmarks/coserve.py, and the fingerprint by which a later call knows its own folder again."""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coserving.plan import MODES, WORST_MODES

SERVING_MODELS = ("qwen3-3m", "qwen3-25m")
ROLLOUT_MODEL = "frozenlake-1m"
CONTEXT_TOKENS = 4096
GIVEN_MS = (500.0, 150.0)  # TTFT, TPOT


@dataclass(frozen=True, slots=True)
class Load:
    """`busy:0.2` and `capacity:0.2` are shares of serving alone; `alone99` is found by search."""

    kind: str
    share: float | None = None

    def __str__(self) -> str:
        return self.kind if self.share is None else f"{self.kind}:{self.share:g}"


def load_of(text: str) -> Load:
    kind, _, number = text.partition(":")
    if text == "alone99":
        return Load("alone99")
    try:
        share = float(number)
    except ValueError:
        share = math.nan
    if kind not in ("busy", "capacity") or not 0 < share < (1 if kind == "busy" else 2):
        raise argparse.ArgumentTypeError(f"`{text}` is not a load: write busy:0.2, capacity:0.2 or alone99")
    return Load(kind, share)


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"`{text}` is not a rate: give requests per second, more than 0")
    return number


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests to replay: our CSV, Azure's or Mooncake's")
    parser.add_argument(
        "--load", type=load_of, default=Load("busy", 0.2), metavar="KIND", help="busy:0.2, capacity:0.2, alone99"
    )
    parser.add_argument(
        "--budget", choices=("given", "calibrated"), default="given", help="500/150 ms, or 2x P99 of serving alone"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, metavar="MODE", help=f"which of {', '.join(MODES)} (all)")
    parser.add_argument("--model", choices=SERVING_MODELS, default=SERVING_MODELS[0], help="the serving model")
    parser.add_argument(
        "--requests", type=int, metavar="N", help="for alone, decode and idle; the rest get at most 300"
    )
    parser.add_argument(
        "--search-requests", type=int, metavar="N",
        help="of each try in the search for alone99 (1000; 40 if quick); with fewer than the run has, alone may attain "
        "less in it",
    )  # fmt: skip
    parser.add_argument(
        "--rate-rps", type=positive, metavar="R",
        help="what --load was found to mean in an earlier run; what serving alone attains at it is in the report",
    )  # fmt: skip
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="where segments are kept; the same call goes on there"
    )
    parser.add_argument(
        "--kv-memory-mb", type=int, default=512, metavar="N", help="of the device, for both models (512)"
    )
    parser.add_argument("--worst-case", action="store_true", help="3 minutes at 95-110 %% of capacity, five seeds")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the run under `decode` as an SVG")


def modes_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Those asked for, in the usual order."""
    possible = WORST_MODES if arguments.worst_case else MODES
    return tuple(mode for mode in possible if arguments.modes is None or mode in arguments.modes)


def name_of(arguments: argparse.Namespace) -> str:
    """A folder name that says what is in it."""
    load = "worst" if arguments.worst_case else str(arguments.load).replace(":", "")
    quick = ["quick"] if arguments.quick else []
    return "-".join([trace_name(arguments.trace), load, arguments.budget, arguments.model, *quick])


def trace_name(path: Path) -> str:
    return path.name.split(".")[0]


def fingerprint(arguments: argparse.Namespace) -> dict[str, Any]:
    """Two calls with the same one may share what they measured. Modes are not in it: others can be added later."""
    return {
        "trace": hashlib.sha256(arguments.trace.read_bytes()).hexdigest()[:16],
        "load": "worst" if arguments.worst_case else str(arguments.load),
        "budget": arguments.budget,
        "model": arguments.model,
        "requests": arguments.requests,
        "search_requests": arguments.search_requests,
        "rate_rps": arguments.rate_rps,
        "kv_memory_mb": arguments.kv_memory_mb,
        "seed": arguments.seed,
        "quick": arguments.quick,
    }
