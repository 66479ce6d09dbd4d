"""`rose serve`: a device, serving one model over HTTP until it is stopped, and lending its slack if it is told to.

rose serve MODEL                          serves MODEL
rose serve MODEL --lend ROLLOUT_MODEL     and lends what serving does not use to rollouts of another model
rose serve --lend ROLLOUT_MODEL           no serving: a dedicated rollout worker

With `--gateway URL` the rollouts' side of the device also works for that gateway.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rose.cli.options import add_settings_options, say, settings_of
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.front.companion import Companion

SUMMARY = "serve a model over HTTP with an OpenAI-compatible interface, and lend its slack to rollouts"

# Flags that are shorter names of settings.
FLAGS = {
    "device": "device",
    "host": "front.host",
    "port": "front.port",
    "name": "model_name",
    "kv_memory_mb": "engine.kv_memory_mb",
    "rollout_port": "rollout.port",
    "lend_mode": "lend.mode",
    "ttft_ms": "lend.ttft_ms",
    "tpot_ms": "lend.tpot_ms",
    "journal": "lend.journal",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", nargs="?", help="a Hugging Face model folder")
    parser.add_argument("--lend", type=Path, metavar="ROLLOUT_MODEL", help="lend the device to rollouts of this model")
    parser.add_argument("--ttft-ms", type=float, metavar="MS", help="serving's budget for the first token (500)")
    parser.add_argument("--tpot-ms", type=float, metavar="MS", help="serving's budget for each later token (150)")
    parser.add_argument("--lend-mode", metavar="MODE", help="decode, idle, paper, alternate or fcfs (decode)")
    parser.add_argument("--rollout-port", type=int, metavar="N", help="TCP port for rollouts; 0 takes any (8001)")
    parser.add_argument("--gateway", metavar="URL", help="work for this gateway (token in ROSE_WORKER_TOKEN)")
    parser.add_argument("--worker-name", metavar="NAME", help="how the gateway calls this device (host and process)")
    parser.add_argument("--journal", metavar="FILE", help="write every lending decision and breach to this file")
    parser.add_argument("--device", metavar="cpu:N", help="cores the engine is pinned to: cpu:0, cpu:0-1 (cpu:0)")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="TCP port; 0 takes a free one (8000)")
    parser.add_argument("--name", help="the name clients use for the model (the folder's)")
    parser.add_argument("--kv-memory-mb", type=int, metavar="N", help="memory for keys and values, in MiB (512)")
    add_settings_options(parser)


def run(arguments: argparse.Namespace) -> int:
    import asyncio
    import logging

    from rose.config.device import DeviceSettings
    from rose.front.loops import loop_factory
    from rose.front.service import serve

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    settings = settings_of(arguments, DeviceSettings, FLAGS)
    companion = _agent(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(arguments.model, settings, lend=arguments.lend, say=say, companion=companion))
    return 0


def _agent(arguments: argparse.Namespace) -> Companion | None:
    """The agent that works for a gateway, if one was named."""
    if arguments.gateway is None:
        return None
    from rose.front.companion import Companion
    from rose.rollout.roles import token_for

    if arguments.lend is None:
        raise ConfigError("a gateway needs a rollout model to work with", hint="name it: --lend ROLLOUT_MODEL")
    if not arguments.gateway.startswith(("http://", "https://")):
        raise ConfigError(f"`{arguments.gateway}` is not an address", hint="for example http://127.0.0.1:8002")
    token = token_for("worker", arguments.gateway)
    if token is None:
        raise ConfigError(
            f"there is no token for the gateway at {arguments.gateway}",
            hint="set ROSE_WORKER_TOKEN to the token that the gateway has for workers",
        )
    known = {"gateway": arguments.gateway, "token": token, "name": arguments.worker_name or ""}
    return Companion("rose.rollout.agent:attend", known)
