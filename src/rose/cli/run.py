"""`rose run`: reinforcement learning end to end on this machine, with a borrowed serving device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SUMMARY = "train a model by reinforcement learning, with rollouts on a device that serves users meanwhile"

EXAMPLES = """examples:
  rose run                                       learn to cross a frozen lake, in a few minutes
  rose run --compare --set steps=16              how much the borrowed device is worth
  rose run --profile rollout-heavy --compare     the same where rollouts take most of the time
  rose run job.yaml --set train.learning_rate=0.0001 --name slower
  rose run --resume runs/slower                  go on with a run that was killed or stopped
  rose run --resume runs/slower --set steps=40   give a run more steps
"""

FINISHED = """The run in {folder} is finished: all of its {steps} steps are done.
next: rose runs show {folder}
  or: rose run --resume {folder} --set steps={more}"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("settings", nargs="?", type=Path, metavar="settings.yaml", help="a YAML file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", dest="overrides", help="one setting; may be repeated"
    )
    parser.add_argument("--profile", metavar="NAME", help="a set of defaults: default or rollout-heavy")
    parser.add_argument("--compare", action="store_true", help="alternate steps with and without the borrowed device")
    parser.add_argument("--asynchronous", action="store_true", help="rollouts never stop; the trainer learns meanwhile")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the run in this folder")
    parser.add_argument("--name", metavar="NAME", help="name of the run and of its folder in runs/ (date and time)")


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging

    from rose.cli.main import EXIT_INTERRUPTED
    from rose.config.text import as_override
    from rose.launch.resuming import is_finished, settings_to_resume
    from rose.launch.settings import load_run_settings

    given = {
        "profile": arguments.profile,
        "name": arguments.name,
        "compare": arguments.compare or None,
        "asynchrony.is_used": arguments.asynchronous or None,
    }
    overrides = [*arguments.overrides, *(as_override(key, value) for key, value in given.items() if value is not None)]
    if arguments.resume is None:
        settings = load_run_settings(arguments.settings, overrides)
    else:
        settings = settings_to_resume(arguments.resume, arguments.settings, overrides)
        if is_finished(arguments.resume, settings.steps):
            print(FINISHED.format(folder=arguments.resume, steps=settings.steps, more=2 * settings.steps))
            return 0
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)

    from rose.front.loops import loop_factory
    from rose.launch.ending import Stopped
    from rose.launch.local import run_locally
    from rose.launch.progress import Screen

    screen = Screen(settings.steps)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run_locally(settings, screen, is_resumed=arguments.resume is not None))
    except Stopped:
        screen.say("stopped; every process of the run has ended")
        return EXIT_INTERRUPTED
    return 0
