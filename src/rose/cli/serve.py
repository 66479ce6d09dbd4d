"""`rose serve`: run a device, which serves one model over HTTP until it is stopped, and lends its idle time if asked.

rose serve MODEL                          serve MODEL
rose serve MODEL --lend ROLLOUT_MODEL     and lend what serving does not use to rollouts of another model
rose serve --lend ROLLOUT_MODEL           do not serve: run a dedicated rollout worker
rose serve --demo                         serve a small model with random weights, made on the spot

With `--gateway URL` the rollout side of the device also works for that gateway.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.cli.options import add_log_option, add_settings_options, labels_of, say, settings_of
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.device.device_server import SidecarTask

SUMMARY = "serve a model like OpenAI's API, and lend idle time to rollouts"
DEMO_PRESET = "qwen3-3m"  # small enough to be made and started in seconds

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
    "tpot": "lend.tpot",
    "journal": "lend.journal",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", nargs="?", help="a Hugging Face model folder")
    parser.add_argument("--demo", action="store_true", help="serve a small random model, made in runs/models")
    parser.add_argument("--lend", type=Path, metavar="ROLLOUT_MODEL", help="lend the device to rollouts of this model")
    parser.add_argument("--ttft-ms", type=float, metavar="MS", help="serving's budget for the first token")
    parser.add_argument("--tpot-ms", type=float, metavar="MS", help="serving's budget for each later token")
    parser.add_argument("--tpot", metavar="WHAT", help="what --tpot-ms is promised for: mean or every_gap (mean)")
    parser.add_argument("--lend-mode", metavar="MODE", help="auto, idle or decode; decode needs both budgets (auto)")
    parser.add_argument("--rollout-port", type=int, metavar="N", help="TCP port for rollouts; 0 takes any (8001)")
    parser.add_argument("--gateway", metavar="URL[,URL]", help="work for this gateway (token: ROSE_WORKER_TOKEN)")
    parser.add_argument("--worker-name", metavar="NAME", help="name in the gateway (default: HOST-PID)")
    parser.add_argument("--label", action="append", default=[], metavar="K=V", help="label in the gateway; repeatable")
    parser.add_argument("--journal", metavar="FILE", help="write every lending decision and breach to this file")
    parser.add_argument("--device", metavar="cpu:N", help="cores the engine is pinned to: cpu:0, cpu:0-1 (cpu:0)")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="TCP port; 0 takes a free one (8000)")
    parser.add_argument("--name", help="the name clients use for the model (the folder's)")
    parser.add_argument("--kv-memory-mb", type=int, metavar="N", help="memory for keys and values, in MiB (512)")
    add_log_option(parser)
    add_settings_options(parser, "serve")


def run(arguments: argparse.Namespace) -> int:
    import asyncio

    from rose.config.server_settings import DeviceSettings
    from rose.device.device_service import serve
    from rose.observe.log_format import choose_format, configure_logs
    from rose.openai.loops import loop_factory

    choose_format(arguments.log_format)
    configure_logs()
    settings = settings_of(arguments, DeviceSettings, FLAGS)
    model = _demo_model(arguments.model) if arguments.demo else arguments.model
    if arguments.lend is not None and model is not None:
        settings.lend.chosen_mode  # noqa: B018  refused before anything is loaded
    sidecar = _agent(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(model, settings, lend=arguments.lend, say=say, sidecar=sidecar))
    return 0


def _demo_model(model: Path | None) -> Path:
    if model is not None:
        raise ConfigError(f"--demo serves its own model, not {model}", hint="leave out one of them")
    folder = Path("runs", "models", DEMO_PRESET)
    if not (folder / "config.json").exists():
        from rose.models.presets import write_preset

        say(f"Making a {DEMO_PRESET} model with random weights in {folder} ...")
        write_preset(DEMO_PRESET, folder, seed=0)
    say("The demo model has random weights, so its answers are noise. Ctrl-C stops the device.")
    return folder


def _agent(arguments: argparse.Namespace) -> SidecarTask | None:
    """Return the agent that works for the gateway, if the operator named one."""
    if arguments.gateway is None:
        return None
    from rose.device.device_server import SidecarTask
    from rose.gateway.auth import token_for

    if arguments.lend is None:
        raise ConfigError("a gateway needs a rollout model to work with", hint="name it: --lend ROLLOUT_MODEL")
    addresses = [address.strip() for address in arguments.gateway.split(",")]
    for address in addresses:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"`{address}` is not an address", hint="for example http://127.0.0.1:8002")
    token = token_for("worker", addresses[0])
    if token is None:
        raise ConfigError(
            f"there is no token for the gateway at {arguments.gateway}",
            hint="set ROSE_WORKER_TOKEN to the token that the gateway has for workers",
        )
    known: dict[str, Any] = {"gateway": arguments.gateway, "token": token, "name": arguments.worker_name or ""}
    known["labels"] = labels_of(arguments.label)
    return SidecarTask("rose.worker.agent:run_as_sidecar", known)
