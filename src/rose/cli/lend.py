"""`rose lend`: the admin controls of a lent device, and rollouts beside a `vllm serve` that runs already.

The command finds the devices of this user on this machine. For a device elsewhere, the owner gives its `--url` and sets
ROSE_OWNER_TOKEN. `rose lend vllm` and `rose lend sglang` start a rollout engine on serving's device and keep it
running, join a gateway if one is named, and obey `rose lend pause`, `resume` and the others. They end with Ctrl-C;
serving does not notice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib import error, request

from rose.cli.options import add_log_option, labels_of
from rose.errors import ConfigError, RequestRefused, Unavailable

SUMMARY = "control a lent device: status, pause, resume, drain, limits"
ACTIONS = {
    "status": "print the state of lending",
    "pause": "run no rollout step until `resume`",
    "resume": "lend again, whatever stopped lending",
    "drain": "evict all rollouts within one step; serving gets their memory",
    "dry-run": "lend nothing, but add up what lending would give (see status)",
    "limits": "limit rollouts, for example: --memory 0.5 --compute 0.3",
    "token": "print the token that rollout clients need",
    "vllm": "start and keep a rollout engine beside a running `vllm serve`",
    "sglang": "start and keep a rollout engine beside a running SGLang server",
}
EXAMPLE = "for example: rose lend {} --serving-url http://127.0.0.1:8000 --rollout-model FOLDER --device cpu:0"
FLAG_HELP = "a further flag of the rollout engine, as in --engine-flag=--dtype=bfloat16; may be given more than once"
ENGINES = ("vllm", "sglang")
MODES = ("auto", "idle", "decode")
ANSWER_S = 10.0  # a device that works answers within milliseconds


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, what in ACTIONS.items():
        action = actions.add_parser(name, help=what, description=what)
        if name in ENGINES:
            _configure_engine(action, name)
            continue
        action.add_argument("--url", help="the device's serving address; not needed if only one runs here")
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "limits":
            action.add_argument(
                "--memory", type=_share("--memory"), metavar="SHARE", help="share of the KV memory, 0 to 1"
            )
            action.add_argument(
                "--compute", type=_share("--compute"), metavar="SHARE", help="share of the time, 0 to 1"
            )
        if name == "drain":
            what = "unload the rollout model too (not with vLLM or SGLang)"
            action.add_argument("--remove", action="store_true", help=what)


def _share(option: str) -> Callable[[str], float]:
    """Return what reads the option's value. It raises ConfigError for values that are not from 0 to 1."""

    def read(text: str) -> float:
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise ConfigError(f"{option} {text} is not a share", hint="give 0 to 1")
        return share

    return read


def _configure_engine(parser: argparse.ArgumentParser, engine: str) -> None:
    add = parser.add_argument
    add("--serving-url", metavar="URL", help="the running server; without: a dedicated worker")
    what = "which engine of a server with data parallelism; its devices are given by --device"
    add("--serving-replica", type=int, default=None, metavar="N", help=what)
    add("--rollout-model", type=Path, metavar="FOLDER", help="folder of the model in training")
    add("--device", default="cpu:0", help="serving's device: cpu:0, cpu:0-3, cuda:0, cuda:0-3 (default cpu:0)")
    if engine == "vllm":
        what = "ranks of the rollout engine (default: one per GPU, or one on a CPU)"
        add("--tensor-parallel", type=int, default=0, metavar="N", help=what)
    add("--gateway", metavar="URL[,URL]", help="the gateway to join (token: ROSE_WORKER_TOKEN)")
    add("--worker-name", default="", metavar="NAME", help="registered name (HOSTNAME-PID)")
    add("--label", action="append", default=[], metavar="K=V", help="label in the gateway; may be repeated")
    add("--owner-host", default="127.0.0.1", metavar="HOST", help="address of the controls and of /metrics (127.0.0.1)")
    add("--owner-port", type=int, default=0, metavar="N", help="port of the controls; 0 is a free one")
    add("--mode", "--lend-mode", choices=MODES, default="auto", help="when to lend; auto is decode with budgets")
    add("--ttft-ms", type=float, metavar="MS", help="serving's budget for a first token")
    add("--tpot-ms", type=float, metavar="MS", help="serving's budget for each later token")
    add("--tpot", choices=("mean", "every_gap"), default="mean", help="what --tpot-ms is promised for")
    add("--slack-share", type=float, default=0.7, metavar="SHARE", help="of the budgets that lending may use up (0.7)")
    add(
        "--compute",
        type=_share("--compute"),
        default=1.0,
        metavar="SHARE",
        help="share of the time for rollouts, 0 to 1 (1)",
    )
    add("--answer-s", type=float, default=60.0, metavar="S", help="users wait this long for an answer (60)")
    add("--max-sequences", type=int, default=16, metavar="N", help="rollouts at once (16)")
    add("--max-context", type=int, default=4096, metavar="N", help="longest rollout; 0 is the model's (4096)")
    add("--step-tokens", type=int, default=256, metavar="N", help="tokens of the largest rollout step (256)")
    add("--kv-memory-mb", type=int, default=256, metavar="N", help="KV memory of the rollouts, without a pool (256)")
    if engine == "vllm":
        what = "KV memory from serving's pool, of its own, or from the pool if there is one (default auto)"
        add("--kv", choices=("auto", "pool", "static"), default="auto", help=what)
    else:
        parser.set_defaults(kv="static", tensor_parallel=0)
    add("--engine-flag", "--vllm-flag", action="append", default=[], metavar="FLAG", help=FLAG_HELP)
    add_log_option(parser)
    what = "Python interpreter that has the engine"
    add("--engine-python", "--vllm-python", default=sys.executable, metavar="PATH", help=what)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action in ENGINES:
        return _lend_beside(arguments)
    if arguments.action == "token":
        token = _token_or_variable(_registered_device(arguments.url).rollout_token, "ROSE_ROLLOUT_TOKEN")
        print(json.dumps({"token": token}) if arguments.json else token)
        return 0
    action, body = arguments.action, {}
    if action == "limits":
        limits = {"memory_share": arguments.memory, "compute_share": arguments.compute}
        body = {name: share for name, share in limits.items() if share is not None}
        if not body:
            raise ConfigError("no limit was given", hint="rose lend limits --memory 0.5 --compute 0.3")
    elif action == "drain" and arguments.remove:
        action = "remove"
    url, token = address_and_token(arguments.url)
    status = _send_command(url, token, action, body)
    print(json.dumps(status, indent=2) if arguments.json else _text(status))
    return 0


def address_and_token(url: str | None) -> tuple[str, str]:
    """Return the address of a lent device and its owner's token."""
    token = os.environ.get("ROSE_OWNER_TOKEN")
    if url is not None and token:
        return url.rstrip("/").removesuffix("/v1"), token
    device = _registered_device(url)
    if not device.url:
        raise ConfigError(f"the device is a dedicated worker for {device.rollout_model}, so it has no lending controls")
    return device.url, _token_or_variable(device.owner_token, "ROSE_OWNER_TOKEN")


def _token_or_variable(token: str, variable: str) -> str:
    # A device does not write a token to the registry that it was given by the environment.
    token = token or os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"the device was started with {variable} set", hint=f"set {variable} here too")
    return token


def address_of(url: str) -> str:
    """Return the address under which a local device registers, from a URL as users type it."""
    return url.rstrip("/").removesuffix("/v1").replace("://localhost", "://127.0.0.1", 1)


def _registered_device(url: str | None) -> Any:
    from rose.device.device_registry import running_devices

    devices = [entry for entry in running_devices() if url is None or address_of(url) in (entry.url, entry.rollout_url)]
    if not devices and url and not os.environ.get("ROSE_OWNER_TOKEN"):
        what = f"{url} is no lent device of this user on this machine"
        raise ConfigError(what, hint="set ROSE_OWNER_TOKEN to the token that the device was started with")
    if not devices:
        where = f"at {url}" if url else "on this machine"
        raise ConfigError(
            f"no lent device of yours runs {where}",
            hint="start one with `rose serve MODEL --lend ROLLOUT_MODEL`; for one elsewhere give --url and set "
            "ROSE_OWNER_TOKEN",
        )
    if len(devices) > 1:
        raise ConfigError(
            f"{len(devices)} lent devices run here: {', '.join(entry.url or entry.rollout_url for entry in devices)}",
            hint="name one of them with --url",
        )
    return devices[0]


def _send_command(url: str, token: str, action: str, body: dict[str, float]) -> dict[str, Any]:
    """Send an admin command to a device and return its new status."""
    path = "/rose/lending" + ("" if action == "status" else f"/{action}")
    return owner_request(url, token, path, None if action == "status" else json.dumps(body).encode())


def owner_request(url: str, token: str, path: str, data: bytes | None = None) -> dict[str, Any]:
    """Return what a device answers its owner: a GET, or with `data` a POST."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        with request.urlopen(request.Request(url + path, data, headers), timeout=ANSWER_S) as response:
            status: dict[str, Any] = json.load(response)
            return status
    except error.HTTPError as refusal:
        try:
            message = str(json.load(refusal)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = refusal.reason
        raise RequestRefused(f"the device answered {refusal.code}: {message}") from refusal
    except (error.URLError, OSError, ValueError) as failure:
        raise Unavailable(f"the device at {url} did not answer: {failure}", hint="is it running?") from failure


def _text(status: dict[str, Any]) -> str:
    breaches = ", ".join(f"{count} {kind}" for kind, count in status["breaches"].items())
    times = [("activated", status["activation_s"]), ("parked", status["parking_s"])]
    moves = "".join(f", {name} in {seconds * 1e3:.1f} ms" for name, seconds in times if seconds is not None)
    lines = {
        status["state"]: status["why"],
        "mode": status["mode"],
        "model": f"{status['model']}, {status['model_bytes'] / (1 << 20):.1f} MiB of weights{moves}",
        "rollouts": f"{status['running']} running, {status['waiting']} waiting, {status['evictions']} evicted",
        "lent": f"{status['lent_tokens']:,} tokens in {status['lent_steps']:,} steps, {status['lent_s']:.1f} s",
        "breaches": f"{breaches} ({status['breaker_trips']} breaker trips)",
        "memory": f"rollouts {status['rollout_pages']} of {status['rollout_pages_max']} pages they may hold, serving "
        f"{status['serving_pages']}, of {status['pages']} x {status['page_bytes'] / (1 << 20):g} MiB "
        f"({status['memory_state']})",
        "limits": f"{status['memory_share']:.0%} of the memory, {status['compute_share']:.0%} of the time",
    }
    serving = status.get("serving")
    if serving and serving["requests"]:
        for name in ("ttft", "tpot"):
            parts = []
            for share in (50, 99):
                now_s, added_s = serving[f"{name}_p{share}_s"], serving[f"{name}_p{share}_added_s"]
                parts.append(f"P{share} {now_s * 1e3:.1f} ms (+{added_s * 1e3:.1f})")
            lines[name] = f"{', '.join(parts)} by lending, last {serving['requests']:,} requests"
    lines["stretch"] = f"serving's requests live {status['lending_stretch']:.2f} times as long as alone"
    if status["dry_run"] is not None:
        dry = status["dry_run"]
        seconds = max(dry["seconds"], 1e-9)
        lines["dry run"] = (
            f"{dry['tokens']:,} tokens would have been computed in {dry['seconds']:.0f} s: "
            f"{dry['tokens'] / seconds:,.0f} per second, in {dry['lent_s'] / seconds:.0%} of the time"
        )
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {what}" for name, what in lines.items())


def _lend_beside(arguments: argparse.Namespace) -> int:
    if arguments.rollout_model is None:
        raise ConfigError("which model should the rollouts run?", hint=EXAMPLE.format(arguments.action))
    import asyncio
    import logging

    from rose.config.server_settings import LendSettings
    from rose.observe.log_format import choose_format, configure_logs
    from rose.vllm.engine_process import RolloutEngineSettings
    from rose.vllm.lend_session import AdminAddress, lend
    from rose.vllm.pool_membership import KvChoice
    from rose.vllm.vllm_agent import VllmEngineClient, VllmLending

    client_type: type[VllmEngineClient] = VllmEngineClient
    if arguments.action == "sglang":
        from rose.sglang.sglang_agent import SglangEngineClient as client_type
    choose_format(arguments.log_format)
    configure_logs(logging.INFO)
    terms = LendSettings(
        mode=arguments.mode,
        ttft_ms=arguments.ttft_ms,
        tpot_ms=arguments.tpot_ms,
        tpot=arguments.tpot,
        slack_share=arguments.slack_share,
        answer_s=arguments.answer_s,
    )
    engine = RolloutEngineSettings(
        arguments.rollout_model,
        arguments.device,
        max_context_tokens=arguments.max_context,
        max_sequences=arguments.max_sequences,
        step_tokens=arguments.step_tokens,
        kv_memory_mb=arguments.kv_memory_mb,
        python=arguments.engine_python,
        extra=tuple(arguments.engine_flag),
        tensor_parallel=arguments.tensor_parallel,
    )
    kv: KvChoice = arguments.kv
    serving, replica = arguments.serving_url or "", arguments.serving_replica
    lending = VllmLending(engine, serving, terms.chosen_mode, terms.budgets, arguments.compute, kv, replica)
    labels = labels_of(arguments.label)
    admin = AdminAddress(arguments.owner_host, arguments.owner_port)
    work = lend(lending, arguments.gateway, arguments.worker_name, admin, client_type, labels)
    return asyncio.run(work)
