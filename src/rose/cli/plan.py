"""`rose plan`: what lending would give on a fleet, from a trace of its own traffic, in virtual time.

Nothing is started and nothing is measured: step times come from public model shapes, or from a profile of your own.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rose.cli.options import JSON_FILE, check_folders, write_file
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.plan.economics import PlanEconomics
    from rose.plan.planning import PlanReport
    from rose.plan.traffic import FleetTraffic
    from rose.plan.windows import Progress

SUMMARY = "say what lending would give on your fleet, from a traffic trace"
EXAMPLES = """examples:
  rose plan --trace my.csv
  rose plan --rate 2.5 --prompt-tokens 1024 --output-tokens 256
  rose plan --trace my.csv --serving qwen2.5-7b --rollout qwen3-8b \\
    --devices 16xh800 --ttft-ms 500 --tpot-ms 150 --dedicated 8 --train-gpus 8 \\
    --job grpo:256x16,turns=alfworld --html plan.html

a job is ALGORITHM:TRAJECTORIESxGROUP, then any of turns=, accept=, oversample=,
likeness=, mfu=, train_s=, link_gbps=, delta=, overlap=yes (docs/plan.md)
"""
WIDTH = 80


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="our CSV, Azure's, Mooncake's JSON lines, or Prometheus' JSON")
    add("--rate", type=float, metavar="R", help="requests a second of the fleet, instead of a trace")
    add("--prompt-tokens", type=float, default=1024, metavar="N", help="mean prompt, with --rate (1024)")
    add("--output-tokens", type=float, default=256, metavar="N", help="mean answer, with --rate (256)")
    add("--devices", metavar="NxGPU", help="the serving fleet (64xh800); also h100, a100, h20, l40s")
    add("--serving", metavar="MODEL[:tpN]", help="what it serves (qwen2.5-32b)")
    add("--rollout", metavar="MODEL", help="what is trained (qwen3-32b)")
    add("--ttft-ms", type=float, metavar="MS", help="budget to the first token (1000)")
    add("--tpot-ms", type=float, metavar="MS", help="budget per token after it (450)")
    add("--answer-s", type=float, metavar="S", help="how long users wait for a whole answer (600)")
    add("--job", default="grpo:1024x16,turns=alfworld", metavar="JOB", help="the RL job (%(default)s)")
    add("--dedicated", type=int, metavar="N", help="GPUs of the job's own for rollouts (16)")
    add("--train-gpus", type=int, metavar="N", help="GPUs of the job's own for training (32)")
    add("--profile", type=Path, metavar="FILE", help="step profile of the serving model, measured by you")
    add("--rollout-profile", type=Path, metavar="FILE", help="the same for the rollout model")
    add("--prices", type=Path, metavar="FILE", help="YAML with keys of `cost` (rose settings)")
    add("--mode", choices=("idle", "decode", "compare"), default="decode", help="how devices lend (decode)")
    add("--hours", type=int, default=24, metavar="H", help="hours of the day to plan for, from the first (24)")
    add("--seed", type=int, default=0, metavar="N", help="seed of all that is drawn (0)")
    add("--json", type=Path, metavar="FILE", help="write all figures to this file; - prints them")
    add("--html", type=Path, metavar="FILE", help="write a page with pictures; it loads nothing from elsewhere")


def run(arguments: argparse.Namespace) -> int:
    from rose.plan.fleet import fleet_of, inputs_of
    from rose.plan.job import job_inputs, job_on
    from rose.plan.planning import make_plan, read_prices

    check_folders(arguments.json, arguments.html)
    if not 1 <= arguments.hours <= 24:
        raise ConfigError(f"{arguments.hours} hours cannot be planned for", hint="give --hours 1 to 24")
    names = ("devices", "serving", "rollout", "dedicated", "train_gpus", "ttft_ms", "tpot_ms", "answer_s")
    inputs = inputs_of(**{name: getattr(arguments, name) for name in names})
    fleet = fleet_of(inputs, arguments.profile, arguments.rollout_profile)
    job, prices = job_on(fleet, job_inputs(arguments.job), arguments.seed), read_prices(arguments.prices)
    traffic = _traffic(arguments, fleet.serving.max_context_tokens)
    report = make_plan(fleet, traffic, job, prices, arguments.mode, arguments.seed, _progress())
    if arguments.json != JSON_FILE:
        print(screen(report))
    if arguments.json:
        import msgspec

        write_file(arguments.json, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    if arguments.html:
        from rose.plan.plan_page import page_of

        write_file(arguments.html, page_of(report))
    return 0


def _traffic(arguments: argparse.Namespace, context_tokens: int) -> FleetTraffic:
    from rose.load.prometheus import is_prometheus
    from rose.plan.traffic import prometheus_traffic, recorded_traffic, traffic_by_hand
    from rose.plan.windows import WINDOW_S

    if (arguments.trace is None) == (arguments.rate is None):
        what = "give either a trace or a rate" if arguments.trace else "no traffic is given"
        raise ConfigError(what, hint="--trace my.csv, or --rate 2.5 --prompt-tokens 1024 --output-tokens 256")
    if arguments.rate is not None:
        return traffic_by_hand(arguments.rate, arguments.prompt_tokens, arguments.output_tokens, context_tokens)
    if is_prometheus(arguments.trace):
        return prometheus_traffic(arguments.trace, context_tokens, arguments.hours)
    return recorded_traffic(arguments.trace, context_tokens, arguments.hours, WINDOW_S)


def _progress() -> Progress:
    """Return what prints a line that is written over, with the time left of its phase; nothing without a terminal."""
    begun: dict[str, float] = {}
    phase_of = {"rollouts": "rollouts"}

    def show(done: int, total: int, what: str) -> None:
        if not sys.stderr.isatty():
            return
        phase = phase_of.get(what.split()[0], what.split(",")[0])
        elapsed_s = time.monotonic() - begun.setdefault(phase, time.monotonic())
        left = f", {elapsed_s / done * (total - done):.0f} s left" if done else ""
        end = "\r\033[K" if done + 1 >= total else ""
        print(f"\r{done}/{total} {what}{left}\033[K{end}", end="", file=sys.stderr, flush=True)

    return show


# The screen


def screen(report: PlanReport) -> str:
    """Return the plan as text of 80 columns."""
    import textwrap

    cost, lost, minute = report.cost, report.lost_per_day, report.worst_minute
    idle = report.lent_share_idle
    lines = [
        report.fleet, report.job, report.traffic, "",
        _curve_lines(report), "",
        f"lent          {report.lent_share.value:.1%} of the time ({report.lent_share.low:.1%} to "
        f"{report.lent_share.high:.1%}, {report.windows} windows), {report.lent_gpu_hours:,.0f} GPU-hours a day"
        + (f"; in idle mode {idle.value:.1%}" if idle else ""),
        f"by hour       {bars([hour.lent_share.value for hour in report.hours])}  "
        f"{min(h.lent_share.value for h in report.hours):.0%} to {max(h.lent_share.value for h in report.hours):.0%}",
        f"held back by  {_reasons(report.held_back)}",
        f"in budget     alone {_share(report.attainment_alone)}",
        f"              lent  {_share(report.attainment_lent)}, n = {report.requests:,}",
        f"lost          {lost.value:,.0f} requests a day (at most {lost.high:,.0f}) of {report.requests_per_day:,.0f}",
        "worst minute  " + (f"{minute.lent} of {minute.requests} in budget, alone {minute.alone}" if minute else "-"),
        f"a step        {_seconds(report.points[-1].rollout_s)} rollouts, {_seconds(report.train_s)} training, "
        f"{_seconds(report.sync_s)} weights; longest trajectory {_seconds(report.longest_trajectory_s)}",
        f"USD for 1,000 correct answers: {_usd(cost.fixed)} without; with, {_usd(cost.margin)} at the margin,",
        f"              {_usd(cost.serving_price)} at the serving price, {_usd(cost.dedicated_price)} at the dedicated "
        "price",
        "break-even    "
        + (f"USD {cost.break_even_usd_per_hour:.2f} for an hour of a borrowed GPU"
           if cost.break_even_usd_per_hour is not None else "not known: the job has no rollouts without borrowing"),
        *_economics_lines(report.economics),
        "", report.advice, "",
        "Simulated, not measured. docs/plan.md and --html say what was assumed.",
    ]  # fmt: skip
    return "\n".join(
        part
        for line in lines
        for whole in line.split("\n")
        for part in (textwrap.wrap(whole, WIDTH, subsequent_indent="  ", drop_whitespace=True) or [""])
    )


def _economics_lines(economics: PlanEconomics) -> list[str]:
    from rose.plan.economics import MORE_ROLLOUTS

    points, spikes = economics.gain_points, economics.spikes
    lines = []
    if points is not None:
        lines.append(
            f"next dollar   to training while {MORE_ROLLOUTS:,.0f} more rollouts a day raise the accept rate by "
            f"more than {points:.3g} points ({_price_lines(economics)})"
        )
    low, high = (pick((hour.lent_hour_usd for hour in economics.slack), default=0.0) for pick in (min, max))
    lines.append(
        f"slack lent    USD {economics.slack_gpu_hour_usd:.2g} for a GPU-hour ({low:.2g} to {high:.2g} by hour) for "
        f"bursts; answers {1000 * economics.slower_answer_s:+.0f} ms, USD {economics.waiting_gpu_hour_usd:.2g}"
    )
    for spike in spikes[-1:]:
        lines.append(
            f"worst case    {spike.times:g} x the busiest minutes on all devices, rollouts wanting all: "
            f"{spike.late_lent:,.0f} of {spike.requests:,.0f} requests a minute late, alone {spike.late_alone:,.0f}"
        )
    return lines


def _price_lines(economics: PlanEconomics) -> str:
    lines = economics.frontier.lines
    return "USD a million rollout tokens: " + ", ".join(f"{line.name} {line.token_usd:.3g}" for line in lines)


def _curve_lines(report: PlanReport) -> str:
    most = max(point.steps_per_day.value for point in report.points) or 1.0
    lines = ["borrowed GPUs   steps a day"]
    for point in report.points:
        steps = point.steps_per_day
        bar = "#" * round(36 * steps.value / most)
        lines.append(f"{point.devices:>13}   {steps.value:>7,.1f} (+- {(steps.high - steps.low) / 2:.1f}) {bar}")
    return "\n".join(lines)


def bars(shares: list[float]) -> str:
    """Return one character per share, the higher the fuller."""
    marks = " ▁▂▃▄▅▆▇█"
    return "".join(marks[round(min(1.0, max(0.0, share)) * (len(marks) - 1))] for share in shares)


def _reasons(held_back: dict[str, float]) -> str:
    shown = [f"{reason} ({share:.1%})" for reason, share in list(held_back.items())[:2] if share >= 0.0005]
    return ", ".join(shown) or "nothing"


def _share(estimate: object) -> str:
    value, low, high = (getattr(estimate, name) for name in ("value", "low", "high"))
    return "no requests" if math.isnan(value) else f"{value:.2%} ({low:.2%} to {high:.2%})"


def _seconds(value: float) -> str:
    return "-" if math.isinf(value) else f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:,.2f}"
