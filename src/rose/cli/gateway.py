"""`rose gateway`: the one door for agents and trainers; devices join it by `rose serve ... --gateway URL`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

SUMMARY = "one door for agents, environments and trainers, with all rollout workers behind it"

# Flags that are shorter names of settings.
FLAGS = {"host": "host", "port": "port", "name": "model_name", "wait_s": "wait_s"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the rollout model: tokenizer and template")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="TCP port; 0 takes a free one (8002)")
    parser.add_argument("--name", help="the name of the rollout model (the folder's)")
    parser.add_argument("--wait-s", type=float, metavar="S", help="longest a turn waits for a worker (30)")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="a YAML file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", dest="overrides", help="one setting; may be repeated"
    )


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging

    from rose.config.gateway import GatewaySettings
    from rose.config.load import load_settings
    from rose.config.text import as_override
    from rose.front.loops import loop_factory
    from rose.rollout.service import run_gateway

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    given = {key: getattr(arguments, flag) for flag, key in FLAGS.items()}
    flags = [as_override(key, value) for key, value in given.items() if value is not None]
    settings = load_settings(GatewaySettings, arguments.settings, [*arguments.overrides, *flags])
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_gateway(arguments.model, settings, say=_say))
    return 0


def _say(what: str) -> None:
    """For whoever watches; a gateway goes on when nobody does any more."""
    with contextlib.suppress(OSError):
        print(what, flush=True)
