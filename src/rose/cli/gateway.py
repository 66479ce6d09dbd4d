"""`rose gateway`: the one door for agents and trainers; devices join it by `rose serve ... --gateway URL`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rose.cli.options import add_settings_options, say, settings_of
from rose.core.router import ROUTER_KINDS

SUMMARY = "one door for agents, environments and trainers, with all rollout workers behind it"

# Flags that are shorter names of settings.
FLAGS = {
    "host": "host",
    "port": "port",
    "name": "model_name",
    "wait_s": "wait_s",
    "ledger": "ledger",
    "router": "router",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of the rollout model: tokenizer and template")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="TCP port; 0 takes a free one (8002)")
    parser.add_argument("--name", help="the name of the rollout model (the folder's)")
    parser.add_argument("--wait-s", type=float, metavar="S", help="longest a turn waits for a worker (30)")
    parser.add_argument("--ledger", metavar="FILE", help="keep trajectories there, through crashes (in memory)")
    parser.add_argument("--router", choices=ROUTER_KINDS, help="how a worker is chosen for a turn (cost)")
    add_settings_options(parser)


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging

    from rose.config.gateway import GatewaySettings
    from rose.front.loops import loop_factory
    from rose.rollout.service import run_gateway

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    settings = settings_of(arguments, GatewaySettings, FLAGS)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_gateway(arguments.model, settings, say=say))
    return 0
