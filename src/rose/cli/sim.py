"""`rose sim`: a whole rollout cluster in virtual time, with trouble of every kind; one seed is one story.

Exit status 1 if anything that must always hold did not, with the last events before it and the command that shows it
again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.sim.world import Report

SUMMARY = "simulate a rollout cluster with crashes, partitions and reclaimed devices, and check what must always hold"
SEEDS_DEFAULT = range(8)


def configure(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="one world; the same number is the same story, to the last token")
    which.add_argument("--seeds", metavar="A..B", help="all worlds from A to B, both included; without any: 0..7")
    parser.add_argument("--minutes", type=float, help="of trouble, in virtual time, before calm returns")
    parser.add_argument("--story", action="store_true", help="print everything that happens")
    parser.epilog = "exit code 0: everything held; 1: something did not"


def run(arguments: argparse.Namespace) -> int:
    from rose.sim.scenario import MINUTES, random_scenario
    from rose.sim.world import simulate

    minutes = arguments.minutes if arguments.minutes is not None else MINUTES
    if not 0 <= minutes <= 24 * 60:
        raise ConfigError(f"{minutes:g} minutes cannot be simulated", hint="give 0 to 1440")
    seeds = _seeds(arguments)
    begun_s = time.monotonic()
    for done, seed in enumerate(seeds):
        if sys.stdout.isatty() and not arguments.story:
            print(f"\rworld {seed} ({done + 1} of {len(seeds)}) ...\033[K", end="", flush=True)
        report = simulate(random_scenario(seed, minutes), listen=print if arguments.story else None)
        if sys.stdout.isatty() and not arguments.story:
            print("\r\033[K", end="")
        print(_line(report))
        if not report.is_fine:
            _explain(report, arguments.story)
            return 1
    print(f"\nEverything held in {len(seeds)} worlds ({time.monotonic() - begun_s:.1f} s of yours).")
    if not arguments.story:
        print(f"Next: rose sim --seed {seeds[-1]} --story")
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


def _line(report: Report) -> str:
    scenario, counts = report.scenario, report.counts
    kinds = f"{scenario.dedicated} dedicated + {scenario.borrowed} borrowed"
    verdict = "fine" if report.is_fine else "VIOLATION"
    return (
        f"seed {scenario.seed:>6}  {verdict}  {report.virtual_s:6.1f} s  {kinds}  "
        + ", ".join(f"{counts.get(name, 0)} {name}" for name in _shown())
        + f"  {report.story_digest[:8]}"
    )


def _shown() -> Iterable[str]:
    return ("trajectories", "placed", "evicted", "lost", "stalled", "restarts")


def _explain(report: Report, has_been_told: bool) -> None:
    print(f"\nwhat did not hold: {report.violation}")
    if not has_been_told:
        print("\nthe last events before it:")
        for line in report.last_lines:
            print(f"  {line}")
    print(f"\ntry: {report.scenario.command} --story")
