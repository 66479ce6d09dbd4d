"""`rose load`: send open-loop load to any OpenAI-compatible server, and report against a latency budget."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rose.cli.main import EXIT_INTERRUPTED
from rose.cli.options import JSON_FILE, check_folders, say, write_file
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.load.load_run import LoadPlan
    from rose.load.traces import Trace

SUMMARY = "send open-loop load to a server, check latencies against budgets"

EXAMPLES = """examples:
  rose load poisson:rate=2 --url http://127.0.0.1:8000 --duration 60
  rose load azure.csv.gz --url http://127.0.0.1:8000 --rate-scale 0.5 \\
    --json out.json --svg out.svg
"""
TRACE_HELP = (
    "a trace file (CSV with arrival_s,prompt_tokens,output_tokens; Azure's CSV; Mooncake's JSON lines; gzip or not) or "
    "a generator: poisson:rate=2, gamma:rate=2,cv=4, spikes:rate=1,factor=8,every_s=60,for_s=10, day:rate=1"
)
FILE_ENDINGS = (".csv", ".gz", ".json", ".jsonl")


def _number(kind: Callable[[str], float], minimum: float, text: str, *, is_open: bool = False) -> float:
    """Return a number from the command line, which must be at least `minimum`, or above it if `is_open`."""
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number") from None
    bound = f"{'above' if is_open else 'at least'} {minimum:g}"
    if not (minimum < value < float("inf") if is_open else minimum <= value < float("inf")):
        raise argparse.ArgumentTypeError(f"`{text}` is not {bound}")
    return value


ABOVE_ZERO = partial(_number, float, 0.0, is_open=True)
AT_LEAST_ZERO = partial(_number, float, 0.0)
COUNT, SEED = partial(_number, int, 1), partial(_number, int, 0)


def configure(parser: argparse.ArgumentParser) -> None:
    from rose.load.driver import RUNNING_MAX, TIMEOUT_S

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("source", metavar="TRACE_OR_GENERATOR", help=TRACE_HELP)
    add("--url", required=True, help="the server, such as http://127.0.0.1:8000")
    add("--ttft-ms", type=ABOVE_ZERO, default=500.0, metavar="MS", help="budget to the first token (500)")
    add("--tpot-ms", type=ABOVE_ZERO, default=150.0, metavar="MS", help="budget per token after it (150)")
    add("--rate-scale", type=ABOVE_ZERO, default=1.0, metavar="F", help="F times as many requests a second (1)")
    add("--duration", type=ABOVE_ZERO, metavar="S", help="seconds of arrivals (the whole trace; generators 60)")
    add("--start", type=AT_LEAST_ZERO, default=0.0, metavar="S", help="where in the trace to begin, in seconds (0)")
    add("--requests", type=COUNT, metavar="N", help="most requests to send")
    add("--context", type=COUNT, metavar="N", help="context in tokens (default: the server's)")
    add(
        "--lengths",
        choices=("shrink", "fit", "keep"),
        default="shrink",
        help="scale all lengths by one factor so that the P99 prompt is a quarter of the context: only if they are "
        "longer (shrink, the default), always (fit), or never (keep); what is still too long is cut",
    )
    add("--seed", type=SEED, default=0, metavar="N", help="seed of generators and prompts (0)")
    add("--model", metavar="NAME", help="model to ask for, if the server has several")
    add("--vocabulary", type=COUNT, metavar="N", help="prompts are random ids below this (256)")
    add(
        "--timeout",
        type=ABOVE_ZERO,
        default=TIMEOUT_S,
        metavar="S",
        help="longest wait from the scheduled arrival (%(default)g)",
    )
    add("--running-max", type=COUNT, default=RUNNING_MAX, metavar="N", help="most concurrent requests (%(default)s)")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the server's key")
    add("--metrics-url", metavar="URL", help="metrics page that counts rollout tokens (URL/metrics)")
    add("--json", type=Path, metavar="FILE", help="write all measurements to this file; - prints them")
    add("--svg", type=Path, metavar="FILE", help="draw latencies, load and rollout tokens over time")


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from rose.load.load_run import run_load
    from rose.load.terminal import table

    check_folders(arguments.json, arguments.svg)
    plan, trace = _plan(arguments), _trace(arguments)
    key = os.environ.get(arguments.api_key_env) if arguments.api_key_env is not None else None
    if arguments.api_key_env is not None and not key:
        what = f"the environment variable {arguments.api_key_env} is empty or not set"
        raise ConfigError(what, hint=f"export {arguments.api_key_env}=...")
    is_json = arguments.json == JSON_FILE
    finished = asyncio.run(run_load(trace, plan, api_key=key, say=_say_on_stderr if is_json else say))
    if not is_json:
        print(f"\n{table(finished.report(), plan.budget)}")
    if arguments.json:
        write_file(arguments.json, json.dumps(finished.document(shlex.join(["rose", *sys.argv[1:]])), indent=1) + "\n")
    if arguments.svg:
        from rose.load.picture import draw

        title = f"{finished.trace.name} to {finished.server.model}"
        write_file(arguments.svg, draw(finished.records, finished.plan.budget, title=title, harvest=finished.harvest))
    if finished.was_stopped:
        return EXIT_INTERRUPTED
    # Missed budgets are a result, not a failure; a server that answered nothing at all is one.
    return 0 if any(record.token_s for record in finished.records) else 1


def _plan(arguments: argparse.Namespace) -> LoadPlan:
    from rose.load.load_report import LatencyBudget
    from rose.load.load_run import LoadPlan

    return LoadPlan(
        url=arguments.url,
        budget=LatencyBudget(arguments.ttft_ms / 1000, arguments.tpot_ms / 1000),
        model=arguments.model,
        context_tokens=arguments.context,
        vocabulary=arguments.vocabulary,
        lengths=arguments.lengths,
        start_s=arguments.start,
        duration_s=arguments.duration,
        rate_scale=arguments.rate_scale,
        requests=arguments.requests,
        timeout_s=arguments.timeout,
        running_max=arguments.running_max,
        metrics_url=arguments.metrics_url,
        seed=arguments.seed,
    )


def _trace(arguments: argparse.Namespace) -> Trace:
    """Return the trace file of that name, or a generated trace that is long enough for the part to be used."""
    from rose.load.generators import DURATION_S, generated
    from rose.load.traces import read_trace

    path = Path(arguments.source)
    if path.exists() or len(path.parts) > 1 or path.suffix in FILE_ENDINGS:
        return read_trace(path)
    if arguments.requests is not None and arguments.duration is None and not arguments.start:
        return generated(arguments.source, seed=arguments.seed, requests=arguments.requests)
    duration_s = (arguments.duration or DURATION_S) * arguments.rate_scale + arguments.start
    return generated(arguments.source, seed=arguments.seed, duration_s=duration_s)


def _say_on_stderr(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
