"""`rose gateway`: start the one endpoint for agents and trainers; devices join by `rose serve ... --gateway URL`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rose.cli.options import add_log_option, add_settings_options, say, settings_of
from rose.core.routing_rules import ROUTER_KINDS

SUMMARY = "start the one endpoint for agents and trainers, before all workers"

# Flags that are shorter names of settings.
FLAGS = {
    "host": "host",
    "port": "port",
    "name": "model_name",
    "wait_s": "wait_s",
    "ledger": "ledger",
    "router": "router",
    "door": "control.api",
    "door_folder": "control.folder",
    "door_relay": "control.relay",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="rollout model folder; the tokenizer and template are used"
    )
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="TCP port; 0 takes a free one (8002)")
    parser.add_argument("--name", help="name of the rollout model in requests (default: the folder's)")
    parser.add_argument("--wait-s", type=float, metavar="S", help="longest a turn waits for a worker (30)")
    parser.add_argument("--ledger", metavar="FILE", help="keep trajectories in this file, so that crashes lose none")
    parser.add_argument("--router", choices=ROUTER_KINDS, help="routing policy for turns (default: cost)")
    parser.add_argument("--door", choices=("vllm",), help="answer vLLM's RL control routes to the trainer")
    parser.add_argument("--door-folder", metavar="DIR", help="read weights from folders below this one")
    parser.add_argument("--door-relay", metavar="ADDRESS", help="relay to publish these weights to")
    add_log_option(parser)
    add_settings_options(parser, "gateway")


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from rose.config.server_settings import GatewaySettings
    from rose.gateway.gateway_service import run_gateway
    from rose.observe.log_format import choose_format, configure_logs
    from rose.openai.loops import loop_factory

    choose_format(arguments.log_format)
    configure_logs()
    settings = settings_of(arguments, GatewaySettings, FLAGS)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_gateway(arguments.model, settings, say=say))
    return 0
