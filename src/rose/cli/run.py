"""`rose run`: reinforcement learning end to end on this machine, with a borrowed serving device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.cli.options import add_log_option, add_override_option, print_json, print_table
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.run.run_settings import RunSettings

SUMMARY = "train a model, with rollouts on a device that also serves users"

EXAMPLES = """examples:
  rose run                                learn to cross a frozen lake
  rose run --compare --set steps=16       measure the borrowed device's worth
  rose run --profile rollout-heavy --compare
                                          the same where rollouts take most time
  rose run --on ray                       the same on the nodes of a Ray cluster
  rose run job.yaml --set train.learning_rate=0.0001 --name slower
  rose run job.yaml --dry-run             check it, and print what would start
  rose run --resume runs/slower           continue a run that was stopped
  rose run --resume runs/slower --set steps=40
                                          give a run more steps
"""

WIDTH = 79
WRAPPED: Any = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}
FINISHED = """The run in {folder} is finished: all of its {steps} steps are done.
next: rose runs show {folder}
  or: rose run --resume {folder} --set steps={more}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("file", nargs="?", type=Path, metavar="settings.yaml", help="a YAML file of settings")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="the same, as other commands name it")
    add_override_option(parser, "run")
    add_log_option(parser)
    parser.add_argument("--profile", metavar="NAME", help="a set of defaults: default or rollout-heavy")
    parser.add_argument("--compare", action="store_true", help="alternate steps with and without the borrowed device")
    parser.add_argument("--asynchronous", action="store_true", help="rollouts never stop; the trainer learns meanwhile")
    parser.add_argument("--on", choices=("local", "ray"), help="where its processes run: on this machine, or on Ray")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the run in this folder")
    parser.add_argument("--name", metavar="NAME", help="name of the run and of its folder in runs/ (date and time)")
    parser.add_argument("--dry-run", action="store_true", help="check it and print what would start; start nothing")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from rose.cli.main import EXIT_INTERRUPTED
    from rose.config.yaml_text import as_override
    from rose.observe.log_format import choose_format, configure_logs
    from rose.run.resuming import is_finished, settings_to_resume
    from rose.run.run_settings import load_run_settings
    from rose.run.trainer_rank import RankPlan, follow, rank_of_torchrun

    if arguments.file is not None and arguments.settings is not None:
        raise ConfigError("two files of settings were given", hint="give one; --set changes single settings of it")
    if arguments.json and not arguments.dry_run:
        raise ConfigError("a run prints no JSON", hint="its figures are in summary.json: rose runs show --json")
    file = arguments.file or arguments.settings
    given = {
        "profile": arguments.profile,
        "name": arguments.name,
        "compare": arguments.compare or None,
        "asynchrony.is_used": arguments.asynchronous or None,
        "cluster.kind": arguments.on,
    }
    overrides = [*arguments.overrides, *(as_override(key, value) for key, value in given.items() if value is not None)]
    if arguments.resume is None:
        settings = load_run_settings(file, overrides)
    else:
        settings = settings_to_resume(arguments.resume, file, overrides)
        if is_finished(arguments.resume, settings.steps):
            print(FINISHED.format(folder=arguments.resume, steps=settings.steps, more=2 * settings.steps))
            return 0
    if arguments.dry_run:
        return _print_plan(settings, arguments)
    if rank := rank_of_torchrun(settings.train.ranks):
        return follow(RankPlan(rank, settings.train))
    choose_format(arguments.log_format)
    configure_logs()

    from rose.openai.loops import loop_factory
    from rose.run.local import run_locally
    from rose.run.past_runs import Stopped
    from rose.run.run_progress import Screen

    screen = Screen(settings.steps)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run_locally(settings, screen, is_resumed=arguments.resume is not None))
    except Stopped:
        screen.say("stopped; every process of the run has ended")
        return EXIT_INTERRUPTED
    return 0


def _print_plan(settings: RunSettings, arguments: argparse.Namespace) -> int:
    """Print what the run would start, and where."""
    import textwrap
    from dataclasses import asdict

    from rose.run.dry_run import plan_run

    plan = plan_run(settings, is_resumed=arguments.resume is not None)
    if arguments.json:
        print_json(asdict(plan))
        return 0
    print(f"{plan.steps} steps of {settings.environment}, in {plan.folder}, on {plan.where}")
    print(f"rollout model: {plan.rollout_model}\nserving model: preset {plan.serving_model}\n")
    rows = [("process", "cores", "niceness")]
    rows += [(each.role, each.cores, str(each.niceness)) for each in plan.processes]
    print_table(rows, right=(2,))
    for each in plan.processes:
        print(textwrap.fill(f"{each.role}: {each.command}", WIDTH, initial_indent="\n", **WRAPPED))
    if plan.changed:
        print("\nsettings that differ from the defaults:")
        print_table([(key, str(value)) for key, value in plan.changed.items()], indent="  ")
    print("".join(f"\nnote: {note}" for note in plan.notes))
    print("\nports are chosen at the start; nothing was started")
    return 0
