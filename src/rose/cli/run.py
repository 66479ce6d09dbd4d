"""`rose run`: reinforcement learning end to end on this machine, with a borrowed serving device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rose.cli.options import add_override_option

SUMMARY = "train a model, with rollouts on a device that serves users meanwhile"

EXAMPLES = """examples:
  rose run                                learn to cross a frozen lake
  rose run --compare --set steps=16       measure the borrowed device's worth
  rose run --profile rollout-heavy --compare
                                          the same where rollouts take most time
  rose run --on ray                       the same on the nodes of a Ray cluster
  rose run job.yaml --set train.learning_rate=0.0001 --name slower
  rose run --resume runs/slower           continue a run that was stopped
  rose run --resume runs/slower --set steps=40
                                          give a run more steps
"""

FINISHED = """The run in {folder} is finished: all of its {steps} steps are done.
next: rose runs show {folder}
  or: rose run --resume {folder} --set steps={more}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("settings", nargs="?", type=Path, metavar="settings.yaml", help="a YAML file of settings")
    add_override_option(parser)
    parser.add_argument("--profile", metavar="NAME", help="a set of defaults: default or rollout-heavy")
    parser.add_argument("--compare", action="store_true", help="alternate steps with and without the borrowed device")
    parser.add_argument("--asynchronous", action="store_true", help="rollouts never stop; the trainer learns meanwhile")
    parser.add_argument("--on", choices=("local", "ray"), help="where its processes run: on this machine, or on Ray")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the run in this folder")
    parser.add_argument("--name", metavar="NAME", help="name of the run and of its folder in runs/ (date and time)")


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging

    from rose.cli.main import EXIT_INTERRUPTED
    from rose.config.yaml_text import as_override
    from rose.run.resuming import is_finished, settings_to_resume
    from rose.run.run_settings import load_run_settings
    from rose.run.trainer_rank import RankPlan, follow, rank_of_torchrun

    given = {
        "profile": arguments.profile,
        "name": arguments.name,
        "compare": arguments.compare or None,
        "asynchrony.is_used": arguments.asynchronous or None,
        "cluster.kind": arguments.on,
    }
    overrides = [*arguments.overrides, *(as_override(key, value) for key, value in given.items() if value is not None)]
    if arguments.resume is None:
        settings = load_run_settings(arguments.settings, overrides)
    else:
        settings = settings_to_resume(arguments.resume, arguments.settings, overrides)
        if is_finished(arguments.resume, settings.steps):
            print(FINISHED.format(folder=arguments.resume, steps=settings.steps, more=2 * settings.steps))
            return 0
    if rank := rank_of_torchrun(settings.train.ranks):
        return follow(RankPlan(rank, settings.train))
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)

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
