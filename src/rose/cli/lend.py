"""`rose lend`: the owner's controls of a lent device.

Finds the devices of this user on this machine by itself; another one is named by `--url`, with its owner's token in
ROSE_OWNER_TOKEN.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib import error, request

from rose.cli import lend_vllm
from rose.errors import ConfigError, RequestRefused, Unavailable

SUMMARY = "the owner's controls of a lent device: status, pause, resume, drain, dry-run, limits"
ACTIONS = {
    "status": "how lending goes",
    "pause": "no rollout step from now on; `resume` goes on where it stopped",
    "resume": "lend again, whatever stopped it",
    "drain": "rollouts out within one step, their memory back to serving; --remove drops the model's weights too "
    "(not beside vLLM, which keeps them)",
    "dry-run": "lend nothing, and add up what lending would give; `status` shows it",
    "limits": "the most memory and time rollouts may have: --memory 0.5 --compute 0.3",
    "token": "print the token that rollout clients need",
    "vllm": "start and keep a rollout engine beside a running `vllm serve`",
}
ANSWER_S = 10.0


def configure(parser: argparse.ArgumentParser) -> None:
    listed = "\n".join(f"  {name:<8} {what}" for name, what in ACTIONS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"actions:\n{listed}"
    parser.add_argument("action", choices=list(ACTIONS), metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("--url", help="the device's serving address; not needed if only one runs here")
    parser.add_argument("--memory", type=float, metavar="SHARE", help="with limits: share of the KV memory, 0 to 1")
    parser.add_argument("--compute", type=float, metavar="SHARE", help="with limits: share of the time, 0 to 1")
    what = "with drain: drop the rollout model's weights too; vLLM keeps them"
    parser.add_argument("--remove", action="store_true", help=what)
    parser.add_argument("--json", action="store_true", help="print the status as JSON")
    lend_vllm.configure(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "vllm":
        return lend_vllm.run(arguments)
    if arguments.action == "token":
        print(_known(_card(arguments.url).rollout_token, "ROSE_ROLLOUT_TOKEN"))
        return 0
    url, token = _where(arguments.url)
    action = "remove" if arguments.action == "drain" and arguments.remove else arguments.action
    status = _ask(url, token, action, _limits(arguments))
    print(json.dumps(status, indent=2) if arguments.json else _text(status))
    return 0


def _limits(arguments: argparse.Namespace) -> dict[str, float] | None:
    if arguments.action != "limits":
        return None
    given = {"memory_share": arguments.memory, "compute_share": arguments.compute}
    found = {name: share for name, share in given.items() if share is not None}
    if not found:
        raise ConfigError("no limit was given", hint="for example: rose lend limits --memory 0.5 --compute 0.3")
    return found


def _where(url: str | None) -> tuple[str, str]:
    token = os.environ.get("ROSE_OWNER_TOKEN")
    if url is not None and token:
        return url.rstrip("/"), token
    card = _card(url)
    if not card.url:
        raise ConfigError(f"{card.rollout_model} has this device for itself: there is no lending to control")
    return card.url, _known(card.owner_token, "ROSE_OWNER_TOKEN")


def _known(token: str, variable: str) -> str:
    """The token of a registry entry, or of the environment. A device writes no token that it was given."""
    found = token or os.environ.get(variable)
    if not found:
        raise ConfigError(f"the device was started with {variable} set", hint=f"set {variable} here too")
    return found


def _card(url: str | None) -> Any:
    from rose.front.devices import running

    cards = [card for card in running() if url is None or url.rstrip("/") in (card.url, card.rollout_url)]
    if not cards:
        where = f"at {url}" if url else "on this machine"
        raise ConfigError(
            f"no lent device of yours runs {where}",
            hint="start one with `rose serve MODEL --lend ROLLOUT_MODEL`; for one elsewhere give --url and set "
            "ROSE_OWNER_TOKEN",
        )
    if len(cards) > 1:
        raise ConfigError(
            f"{len(cards)} lent devices run here: {', '.join(card.url or card.rollout_url for card in cards)}",
            hint="name one of them with --url",
        )
    return cards[0]


def _ask(url: str, token: str, action: str, body: dict[str, float] | None) -> dict[str, Any]:
    path = "/rose/lending" + ("" if action == "status" else f"/{action}")
    data = None if action == "status" else json.dumps(body or {}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        with request.urlopen(request.Request(url + path, data, headers), timeout=ANSWER_S) as reply:
            found: dict[str, Any] = json.load(reply)
            return found
    except error.HTTPError as refusal:
        raise RequestRefused(f"the device said {refusal.code}: {_message(refusal)}") from refusal
    except (error.URLError, OSError, ValueError) as failure:
        raise Unavailable(f"the device at {url} did not answer: {failure}", hint="is it running?") from failure


def _message(refusal: error.HTTPError) -> str:
    try:
        return str(json.load(refusal)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return refusal.reason


def _text(status: dict[str, Any]) -> str:
    page_mib = status["page_bytes"] / (1 << 20)
    breaches = ", ".join(f"{count} {kind}" for kind, count in status["breaches"].items())
    lines = {
        status["state"]: status["why"],
        "mode": status["mode"],
        "model": f"{status['model']}, {status['model_bytes'] / (1 << 20):.1f} MiB of weights{_times(status)}",
        "rollouts": f"{status['running']} running, {status['waiting']} waiting, {status['evictions']} evicted",
        "lent": f"{status['lent_tokens']:,} tokens in {status['lent_steps']:,} steps, {status['lent_s']:.1f} s",
        "breaches": f"{breaches} ({status['doubtful']} doubtful, {status['breaker_trips']} breaker trips)",
        "memory": f"rollouts {status['rollout_pages']} of {status['rollout_pages_max']} pages they may hold, serving "
        f"{status['serving_pages']}, of {status['pages']} x {page_mib:g} MiB ({status['memory_state']})",
        "limits": f"{status['memory_share']:.0%} of the memory, {status['compute_share']:.0%} of the time",
        "stretch": f"serving's requests live {status['lending_stretch']:.2f} times as long as alone",
    }
    if status["dry_run"] is not None:
        dry = status["dry_run"]
        seconds = max(dry["seconds"], 1e-9)
        lines["dry run"] = (
            f"{dry['tokens']:,} tokens would have been computed in {dry['seconds']:.0f} s: "
            f"{dry['tokens'] / seconds:,.0f} per second, in {dry['lent_s'] / seconds:.0%} of the time"
        )
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {what}" for name, what in lines.items())


def _times(status: dict[str, Any]) -> str:
    known = [("activated", status["activation_s"]), ("parked", status["parking_s"])]
    return "".join(f", {name} in {seconds * 1e3:.1f} ms" for name, seconds in known if seconds is not None)
