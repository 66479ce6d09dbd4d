"""`rose sim`: simulate a rollout cluster in virtual time under random faults; one seed gives one sequence of events.

If an invariant is violated, the exit code is 1, and the last events are printed with the command that repeats them.
"""

from __future__ import annotations

import argparse
import sys
import time

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
    parser.epilog = "exit code 0: all invariants held; 1: one did not"


def run(arguments: argparse.Namespace) -> int:
    from rose.sim.scenario import MINUTES, random_scenario
    from rose.sim.world import simulate

    minutes = arguments.minutes if arguments.minutes is not None else MINUTES
    if not 0 <= minutes <= 24 * 60:
        raise ConfigError(f"{minutes:g} minutes cannot be simulated", hint="give 0 to 1440")
    seeds = _seeds(arguments)
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


def _seeds(arguments: argparse.Namespace) -> range:
    if arguments.seed is not None:
        return range(arguments.seed, arguments.seed + 1)
    if arguments.seeds is None:
        return SEEDS_DEFAULT
    first, dots, last = arguments.seeds.partition("..")
    if not (dots and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ConfigError(f"`{arguments.seeds}` names no seeds", hint="write them as 0..99")
    return range(int(first), int(last) + 1)
