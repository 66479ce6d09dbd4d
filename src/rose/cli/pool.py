"""`rose pool`: the workers of a gateway, and orders to one of them, to those with a label, or to all.

The command finds the gateway of this user on this machine. For one elsewhere, the operator gives `--gateway` and sets
ROSE_OPERATOR_TOKEN. An order holds until the next one, also for workers that join later; the owner of a device has the
last word on the device itself (`rose lend`).
"""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib import error, request

from rose.cli.options import labels_of, print_table
from rose.errors import ConfigError, RequestRefused, Unavailable

SUMMARY = "list and control the workers of a gateway: pause, drain, limits"
ORDERS = {
    "pause": "give them no turns; the rollout model stays loaded",
    "resume": "give them turns again",
    "drain": "give them no turns, and serving the memory of the rollout model",
    "limits": "bound the turns that each of them runs at once",
}
ANSWER_S = 10.0  # an order to 1,000 workers takes a fraction of a second
PAST = {"pause": "paused", "resume": "resumed", "drain": "drained", "limits": "limited"}
NAMES_SHOWN = 5


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list the workers", allow_abbrev=False)
    ls.add_argument("--label", action="append", default=[], metavar="K=V", help="only those with this label")
    show = actions.add_parser("show", help="show one worker", allow_abbrev=False)
    show.add_argument("worker", metavar="WORKER")
    for name, what in ORDERS.items():
        action = actions.add_parser(name, help=what, description=what, allow_abbrev=False)
        action.add_argument("workers", nargs="*", metavar="WORKER", help="names of workers")
        action.add_argument("--all", action="store_true", help="all workers, also those that join later")
        label = "those with this label, also later; repeat it for workers that have all of them"
        action.add_argument("--label", action="append", default=[], metavar="K=V", help=label)
        if name == "limits":
            action.add_argument("--turns", type=int, metavar="N", help="most turns at once on each worker")
            action.add_argument("--no-limit", action="store_true", help="take the limit away")
    token = actions.add_parser("token", help="print the operator's token, which the live page asks for")
    for action in actions.choices.values():
        action.add_argument("--gateway", metavar="URL[,URL]", help="its address; not needed if only one runs here")
        if action is not token:
            action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    gateways = [(url, _token_of(url)) for url in _addresses(arguments.gateway)]
    if arguments.action == "token":
        print("\n".join(token for _, token in gateways))
    elif arguments.action in ("ls", "show"):
        _show_workers(arguments, [_ask(url, token, "/v1/pool") for url, token in gateways])
    else:
        body = order_body(arguments)
        _show_reply(arguments, [_ask(url, token, "/v1/pool/orders", body) for url, token in gateways])
    return 0


def order_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the order that the command line gives. Raises ConfigError for none or for two at once."""
    labels = labels_of(arguments.label)
    if bool(arguments.workers) + bool(labels) + arguments.all != 1:
        raise ConfigError(
            f"which workers should `rose pool {arguments.action}` change?",
            hint="give their names, or --label K=V, or --all: one of the three",
        )
    body: dict[str, Any] = {"action": arguments.action}
    body |= {"workers": arguments.workers} if arguments.workers else {}
    body |= {"labels": labels} if labels else {}
    body |= {"all": True} if arguments.all else {}
    if arguments.action == "limits":
        if (arguments.turns is None) != arguments.no_limit:
            raise ConfigError("which limit?", hint="give --turns N, or --no-limit to take it away")
        if arguments.turns is not None and arguments.turns < 1:
            raise ConfigError(f"--turns {arguments.turns} is not a limit", hint="for none: rose pool pause")
        body["turns_max"] = arguments.turns
    return body


def _addresses(given: str | None) -> list[str]:
    from rose.gateway.auth import running_gateways

    if given is not None:
        addresses = [address.strip().rstrip("/") for address in given.split(",")]
        for address in addresses:
            if not address.startswith(("http://", "https://")):
                raise ConfigError(f"`{address}` is not an address", hint="for example http://127.0.0.1:8002")
        return addresses
    known = list(dict.fromkeys(entry.url for entry in running_gateways()))  # a run enters its gateway too
    if not known:
        hint = "start one with `rose gateway MODEL`; for one elsewhere give --gateway and set ROSE_OPERATOR_TOKEN"
        raise ConfigError("no gateway of yours runs on this machine", hint=hint)
    if len(known) > 1:
        raise ConfigError(f"{len(known)} gateways run here: {', '.join(known)}", hint="name one with --gateway")
    return known


def _token_of(url: str) -> str:
    from rose.gateway.auth import token_for

    token = token_for("operator", url.replace("://localhost", "://127.0.0.1", 1))
    if token is None:
        hint = "set ROSE_OPERATOR_TOKEN to the token that the gateway has for operators"
        raise ConfigError(f"there is no operator's token for the gateway at {url}", hint=hint)
    return token


def _ask(url: str, token: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    try:
        with request.urlopen(request.Request(url + path, data, headers), timeout=ANSWER_S) as response:
            reply: dict[str, Any] = json.load(response)
            return reply
    except error.HTTPError as refusal:
        try:
            message = str(json.load(refusal)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = refusal.reason
        raise RequestRefused(f"the gateway at {url} answered {refusal.code}: {message}") from refusal
    except (error.URLError, OSError, ValueError) as failure:
        raise Unavailable(f"the gateway at {url} did not answer: {failure}", hint="is it running?") from failure


def _show_workers(arguments: argparse.Namespace, pools: list[dict[str, Any]]) -> None:
    workers = [worker for pool in pools for worker in pool["members"]]
    if arguments.action == "show":
        workers = [worker for worker in workers if worker["name"] == arguments.worker]
        if not workers:
            raise RequestRefused(f"there is no worker `{arguments.worker}`", hint="`rose pool ls` lists them")
        print(json.dumps(workers[0], indent=2) if arguments.json else _details(workers[0]))
        return
    wanted = labels_of(arguments.label).items()
    workers = [worker for worker in workers if wanted <= worker["labels"].items()]
    if arguments.json:
        print(json.dumps(workers, indent=2))
        return
    rows = [("worker", "kind", "state", "turns", "tok/s", "version", "first token P99", "lost", "labels")]
    for worker in sorted(workers, key=lambda worker: str(worker["name"])):
        serving = worker["serving"] or {}
        lost = f"{serving['counted']} + {serving['ambiguous']}?" if serving else ""
        rows.append((
            worker["name"], worker["kind"], worker["state"], f"{worker['turns']}/{worker['seats']}",
            f"{worker['tokens_per_s']:.0f}", worker["version"],
            _against(serving["ttft_p99_s"], serving["ttft_budget_s"]) if serving else "", lost,
            _labels(worker["labels"]),
        ))  # fmt: skip
    print_table([[plain(cell) for cell in row] for row in rows], right=(3, 4, 6, 7))


def _details(worker: dict[str, Any]) -> str:
    serving = worker["serving"] or {}
    lines = {
        "worker": f"{worker['name']} ({worker['kind']})",
        "state": f"{worker['state']}: {worker['trouble']}" if worker["trouble"] else worker["state"],
        "ordered": worker["ordered"],
        "labels": _labels(worker["labels"]) or "none",
        "turns": f"{worker['turns']} of at most {worker['seats']}, {worker['turns_ended']} ended",
        "speed": f"{worker['tokens_per_s']:.0f} tokens per second",
        "version": worker["version"],
    }
    if serving:
        for key, name in (("ttft", "first token"), ("tpot", "later tokens")):
            p50 = _against(serving[f"{key}_p50_s"], None)
            lines[name] = f"P50 {p50}, P99 {_against(serving[f'{key}_p99_s'], serving[f'{key}_budget_s'])}"
        lines["users"] = f"{serving['requests']:,} requests lately"
        lines["lost"] = f"{serving['counted']} deadlines to lending, {serving['ambiguous']} perhaps"
        resting = ", which rests now" if serving["is_resting"] else ""
        lines["breaker"] = f"{serving['breaker_trips']} trips{resting}"
        if serving["lent_share"] is not None:
            lines["lent"] = f"{serving['lent_share']:.0%} of the time"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {plain(what)}" for name, what in lines.items())


def _show_reply(arguments: argparse.Namespace, replies: list[dict[str, Any]]) -> None:
    matched = [name for reply in replies for name in reply["matched"]]
    absent = [name for name in replies[0]["absent"] if all(name in reply["absent"] for reply in replies)]
    if arguments.json:
        print(json.dumps({"action": arguments.action, "matched": matched, "absent": absent}, indent=2))
        return
    print(f"{PAST[arguments.action]}: {_names(matched)}")
    if absent:
        print(f"not in the pool now: {_names(absent)}; the order holds when they join")
    if not all(reply["is_durable"] for reply in replies):
        print("the order holds until the gateway ends; start it with --ledger FILE to keep orders")


def plain(text: str) -> str:
    """Return a text of a worker without characters that would control the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _names(names: list[str]) -> str:
    if len(names) <= NAMES_SHOWN:
        return plain(", ".join(names)) or "no worker"
    return plain(f"{len(names):,} workers ({', '.join(names[:NAMES_SHOWN])} ...)")


def _labels(labels: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _against(seconds: float | None, budget_s: float | None) -> str:
    text = "?" if seconds is None else f"{seconds * 1e3:.1f} ms"
    return text if budget_s is None else f"{text} of {budget_s * 1e3:.0f}"
