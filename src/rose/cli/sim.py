"""`rose sim`: simulate a rollout cluster in virtual time under random faults; one seed gives one sequence of events.

If an invariant is violated, the exit code is 1, and the last events are printed with the command that repeats them.
With `--profile` it forecasts one lent device instead, from step profiles that `rose profile` has recorded.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rose.cli.options import add_json_option, print_json
from rose.errors import ConfigError

SUMMARY = "simulate a rollout cluster with faults, and check its invariants"
SEEDS_DEFAULT = range(8)
COUNTS = ("trajectories", "placed", "evicted", "lost", "stalled", "restarts")  # printed per seed


def configure(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="simulate one cluster; the same seed gives the same events")
    which.add_argument("--seeds", metavar="A..B", help="simulate all seeds from A to B (default: 0..7)")
    parser.add_argument("--minutes", type=float, metavar="M", help="virtual minutes with faults, before they cease")
    parser.add_argument(
        "--events", "--story", action="store_true", dest="events", help="print every event (--story: former name)"
    )
    group = parser.add_argument_group("forecast of one lent device, instead of a cluster")
    group.add_argument("--profile", type=Path, metavar="FILE", help="step profile of the serving model")
    group.add_argument("--rollout-profile", type=Path, metavar="FILE", help="step profile of the rollout model")
    group.add_argument("--trace", type=Path, metavar="FILE", help="users' requests; or give --rate")
    group.add_argument("--rate", type=float, metavar="R", help="requests a second, instead of a trace")
    group.add_argument("--prompt-tokens", type=float, default=300, metavar="N", help="mean prompt, with --rate (300)")
    group.add_argument("--output-tokens", type=float, default=45, metavar="N", help="mean answer, with --rate (45)")
    group.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of traffic (60)")
    group.add_argument("--ttft-ms", type=float, default=500.0, help="budget to the first token (500)")
    group.add_argument("--tpot-ms", type=float, default=150.0, help="budget per token after it (150)")
    add_json_option(parser)
    parser.epilog = "exit code 0: all invariants held; 1: one did not"


def run(arguments: argparse.Namespace) -> int:
    if arguments.profile is not None or arguments.rollout_profile is not None:
        return _forecast(arguments)
    if arguments.trace is not None or arguments.rate is not None:
        raise ConfigError("a trace is for one device", hint="give --profile FILE --rollout-profile FILE too")
    from rose.sim.scenario import MINUTES, random_scenario
    from rose.sim.world import simulate

    minutes = arguments.minutes if arguments.minutes is not None else MINUTES
    if not 0 <= minutes <= 24 * 60:
        raise ConfigError(f"{minutes:g} minutes cannot be simulated", hint="give 0 to 1440")
    seeds = _seeds(arguments)
    if arguments.json:
        return _as_json(seeds, minutes)
    begun_s = time.monotonic()
    for done, seed in enumerate(seeds):
        if sys.stdout.isatty() and not arguments.events:
            print(f"\rseed {seed} ({done + 1} of {len(seeds)}) ...\033[K", end="", flush=True)
        report = simulate(random_scenario(seed, minutes), listen=print if arguments.events else None)
        if sys.stdout.isatty() and not arguments.events:
            print("\r\033[K", end="")
        kinds = f"{report.scenario.dedicated} dedicated + {report.scenario.borrowed} borrowed"
        verdict = "fine" if report.is_fine else "VIOLATION"
        counts = ", ".join(f"{report.counts.get(name, 0)} {name}" for name in COUNTS)
        digest = report.story_digest[:8]
        print(f"seed {seed:>6}  {verdict}  {report.virtual_s:6.1f} s  {kinds}  {counts}  {digest}")
        if not report.is_fine:
            print(f"\nviolated: {report.violation}")
            if not arguments.events:
                print("\n".join(["\nthe last events before it:", *(f"  {line}" for line in report.last_lines)]))
            print(f"\ntry: {report.scenario.command} --events")
            return 1
    print(f"\nAll invariants held for {len(seeds)} seeds ({time.monotonic() - begun_s:.1f} s).")
    if not arguments.events:
        print(f"Next: rose sim --seed {seeds[-1]} --events")
    return 0


def _forecast(arguments: argparse.Namespace) -> int:
    from rose.core.slo import Budgets
    from rose.engines.profiles import load_profile
    from rose.observe.intervals import share_text
    from rose.plan.traffic import recorded_traffic, traffic_by_hand
    from rose.sim.device_forecast import forecast

    if arguments.profile is None or arguments.rollout_profile is None:
        raise ConfigError("a lent device runs two models", hint="give both --profile and --rollout-profile")
    if (arguments.trace is None) == (arguments.rate is None):
        raise ConfigError("give either a trace or a rate", hint="--trace my.csv, or --rate 4")
    if not 1 <= arguments.seconds <= 3600:
        raise ConfigError(f"{arguments.seconds:g} seconds cannot be forecast", hint="give --seconds 1 to 3600")
    context, seconds = load_profile(arguments.profile).max_context_tokens, arguments.seconds
    if arguments.rate is not None:
        traffic = traffic_by_hand(arguments.rate, arguments.prompt_tokens, arguments.output_tokens, context)
    else:
        traffic = recorded_traffic(arguments.trace, context, 24, seconds)
    begin_s, _ = traffic.hours[0].spans[0]
    seed = arguments.seed or 0
    arrivals = traffic.source.arrivals((begin_s, begin_s + seconds), 1.0, random.Random(seed))
    budgets = Budgets(arguments.ttft_ms / 1000, arguments.tpot_ms / 1000, answer_s=600.0)
    found = forecast(arguments.profile, arguments.rollout_profile, arrivals, budgets, seconds=seconds, seed=seed)
    if arguments.json:
        print_json({"traffic": traffic.what, **asdict(found)})
        return 0
    print(f"{traffic.what}; {found.requests:,} requests in {seconds:g} s, 32 trajectories of rollouts")
    print(f"rollouts   {found.rollout_tokens_s:,.0f} tokens/s computed, {found.lent_share:.1%} of the time lent")
    print(f"TTFT       P50 {1000 * found.ttft_p50_s:.1f} ms, P99 {1000 * found.ttft_p99_s:.1f} ms, without HTTP")
    print(f"TPOT       P50 {1000 * found.tpot_p50_s:.2f} ms, P99 {1000 * found.tpot_p99_s:.2f} ms")
    print(f"in budget  {share_text(round(found.in_budget * found.requests), found.requests, 'requests')}")
    return 0


def _as_json(seeds: range, minutes: float) -> int:
    """Simulate, and print what came of every seed; a violation ends it, as without `--json`."""
    from rose.sim.scenario import random_scenario
    from rose.sim.world import simulate

    rows, is_fine = [], True
    for seed in seeds:
        report = simulate(random_scenario(seed, minutes))
        is_fine = report.is_fine
        violation = None if is_fine else str(report.violation)
        row = {"seed": seed, "is_fine": is_fine, "violation": violation, "virtual_s": report.virtual_s}
        rows.append(row | {"counts": dict(report.counts), "digest": report.story_digest})
        if not is_fine:
            break
    print_json(rows)
    return 0 if is_fine else 1


def _seeds(arguments: argparse.Namespace) -> range:
    if arguments.seed is not None:
        return range(arguments.seed, arguments.seed + 1)
    if arguments.seeds is None:
        return SEEDS_DEFAULT
    first, dots, last = arguments.seeds.partition("..")
    last = last if dots else first
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ConfigError(f"`{arguments.seeds}` names no seeds", hint="write them as 0..99, or --seed 5 for one")
    return range(int(first), int(last) + 1)
