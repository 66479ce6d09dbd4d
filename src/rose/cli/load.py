"""`rose load`: open-loop load on any OpenAI-compatible server, and a report against a latency budget."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.cli.main import EXIT_INTERRUPTED
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.load.run import Finished, Plan
    from rose.load.traces import Trace

SUMMARY = "send open-loop load from a trace or a generator, and report latencies against a budget"

EXAMPLES = """examples:
  rose load poisson:rate=2 --url http://127.0.0.1:8000 --duration 60
  rose load azure.csv.gz --url http://127.0.0.1:8000 --rate-scale 0.5 --json out.json --svg out.svg
"""
TRACE_HELP = (
    "a trace file (CSV with arrival_s,prompt_tokens,output_tokens; Azure's CSV; Mooncake's JSON lines; gzip or not) or "
    "a generator: poisson:rate=2, gamma:rate=2,cv=4, spikes:rate=1,factor=8,every_s=60,for_s=10, day:rate=1"
)
FILE_ENDINGS = (".csv", ".gz", ".json", ".jsonl")


def configure(parser: argparse.ArgumentParser) -> None:
    from rose.load.driver import RUNNING_MAX, TIMEOUT_S

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("source", metavar="TRACE_OR_GENERATOR", help=TRACE_HELP)
    add("--url", required=True, help="the server, such as http://127.0.0.1:8000")
    add("--ttft-ms", type=_above_zero, default=500.0, metavar="MS", help="budget to the first token (500)")
    add("--tpot-ms", type=_above_zero, default=150.0, metavar="MS", help="budget per token after it (150)")
    add("--rate-scale", type=_above_zero, default=1.0, metavar="F", help="F times as many requests a second (1)")
    add("--duration", type=_above_zero, metavar="S", help="seconds of arrivals (the whole trace; generators 60)")
    add("--start", type=_at_least_zero, default=0.0, metavar="S", help="where in the trace to begin, in seconds (0)")
    add("--requests", type=_count, metavar="N", help="send at most so many")
    add("--context", type=_count, metavar="N", help="context in tokens (what the server says)")
    add(
        "--lengths",
        choices=("shrink", "fit", "keep"),
        default="shrink",
        help="scale all lengths by one factor so that the P99 prompt is a quarter of the context: only if they are "
        "longer (shrink, the default), always (fit), or never (keep); what is still too long is cut",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="of generators and prompts (0)")
    add("--model", metavar="NAME", help="if the server has several")
    add("--vocabulary", type=_count, metavar="N", help="prompts are random ids below this (256)")
    add("--timeout", type=_above_zero, default=TIMEOUT_S, metavar="S", help="from the scheduled arrival (%(default)g)")
    add("--running-max", type=_count, default=RUNNING_MAX, metavar="N", help="most under way at once (%(default)s)")
    add("--api-key-env", metavar="NAME", help="the environment variable that holds the server's key")
    add("--metrics-url", metavar="URL", help="where a lending device shows what it harvested (URL/metrics)")
    add("--json", type=Path, metavar="FILE", help="write everything measured here")
    add("--svg", type=Path, metavar="FILE", help="draw latencies, load and harvest over time here")


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from rose.load.run import run_load
    from rose.load.table import table

    for path in filter(None, (arguments.json, arguments.svg)):
        if not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}", hint="make it first")
    plan, trace = _plan(arguments), _trace(arguments)
    finished = asyncio.run(run_load(trace, plan, api_key=_key(arguments.api_key_env), say=_say))
    print(f"\n{table(finished.report(), plan.budget)}")
    _write(finished, arguments)
    return _exit_code(finished)


def _plan(arguments: argparse.Namespace) -> Plan:
    from rose.load.report import Budget
    from rose.load.run import Plan

    return Plan(
        url=arguments.url,
        budget=Budget(arguments.ttft_ms / 1000, arguments.tpot_ms / 1000),
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
    """A file if there is one of that name, else a generator's; generated far enough for what is cut from it."""
    from rose.load.formats import read_trace
    from rose.load.generators import DURATION_S, generated

    path = Path(arguments.source)
    if path.exists() or len(path.parts) > 1 or path.suffix in FILE_ENDINGS:
        return read_trace(path)
    if arguments.requests is not None and arguments.duration is None and not arguments.start:
        return generated(arguments.source, seed=arguments.seed, requests=arguments.requests)
    duration_s = (arguments.duration or DURATION_S) * arguments.rate_scale + arguments.start
    return generated(arguments.source, seed=arguments.seed, duration_s=duration_s)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"the environment variable {variable} is empty or not set", hint=f"export {variable}=...")
    return key


def _say(words: str) -> None:
    print(words, flush=True)


def _write(finished: Finished, arguments: argparse.Namespace) -> None:
    if arguments.json:
        document = finished.document(shlex.join(["rose", *sys.argv[1:]]))
        _put(arguments.json, json.dumps(document, indent=1) + "\n")
    if arguments.svg:
        from rose.load.picture import draw

        title = f"{finished.trace.name} to {finished.server.model}"
        _put(arguments.svg, draw(finished.records, finished.plan.budget, title=title, harvest=finished.harvest))


def _put(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", hint="name another file") from error
    print(f"written to {path}")


def _exit_code(finished: Finished) -> int:
    """Misses are a result; a server that answered nothing at all is a failure."""
    if finished.was_stopped:
        return EXIT_INTERRUPTED
    return 0 if any(record.token_s for record in finished.records) else 1


def _number(text: str, kind: Any, minimum: float, *, is_open: bool = False) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number") from None
    bound = f"{'above' if is_open else 'at least'} {minimum:g}"
    if not (minimum < value < float("inf") if is_open else minimum <= value < float("inf")):
        raise argparse.ArgumentTypeError(f"`{text}` is not {bound}")
    return value


def _above_zero(text: str) -> float:
    return float(_number(text, float, 0.0, is_open=True))


def _at_least_zero(text: str) -> float:
    return float(_number(text, float, 0.0))


def _count(text: str) -> int:
    return int(_number(text, int, 1))


def _seed(text: str) -> int:
    return int(_number(text, int, 0))
