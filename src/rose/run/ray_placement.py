"""Which node of a Ray cluster takes which process of a run: pure decisions, without Ray.

A run has four roles. `trainer` is the process that the user starts, with the trainer's thread, the environments and the
relay of the weights, so its node is chosen by starting it there. `control` is the gateway, `serving` the device that
serves users with their traffic, and `dedicated` the rollout worker. Each of the last three is one bundle of a placement
group. Nodes may have a label (`rose/role` unless the settings name another) that says which role they take, or `any`;
once one node has it, nodes without it take nothing. In a cluster without labels every node takes every role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rose.errors import ConfigError
from rose.run.process_specs import BORROWED, DEDICATED, GATEWAY, TRAFFIC
from rose.run.processes import Command
from rose.run.run_settings import ClusterSettings, RunSettings

CONTROL, SERVING, WORKER, ANY = "control", "serving", "dedicated", "any"
ROLE_OF = {GATEWAY: CONTROL, BORROWED: SERVING, TRAFFIC: SERVING, DEDICATED: WORKER}
LISTENING = ("gateway", "serve")  # commands that listen, and have a flag for it
MODELS, LEDGER = "models", "ledger.sqlite"  # in the folder of a process on its node


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node that is alive; `role` is the value of its label."""

    name: str
    address: str
    role: str | None
    cpus: float

    def takes(self, role: str, *, is_labelled: bool) -> bool:
        return self.role in (role, ANY) or not is_labelled


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself."""

    address: str
    rose: str | None  # the version that it imports
    python: str
    cores: tuple[int, ...]
    niceness: int


def roles_of(settings: RunSettings) -> tuple[str, ...]:
    """Return the roles that the run needs nodes for, the bundles of its placement group."""
    return (CONTROL, SERVING, WORKER) if settings.worker.is_used else (CONTROL, SERVING)


def is_labelled(nodes: Sequence[ClusterNode]) -> bool:
    return any(node.role is not None for node in nodes)


def selectors(nodes: Sequence[ClusterNode], roles: Sequence[str], key: str) -> list[dict[str, str]]:
    """Return Ray's label selector of each role's bundle."""
    return [{key: f"in({role},{ANY})"} if is_labelled(nodes) else {} for role in roles]


def missing(nodes: Sequence[ClusterNode], roles: Sequence[str], own: ClusterSettings) -> str:
    """Return what the cluster lacks for these roles, next to what it has; nothing if it can hold them."""
    labelled, what = is_labelled(nodes), []
    for role in roles:
        takers = [node for node in nodes if node.takes(role, is_labelled=labelled)]
        if not takers:
            what.append(f"no node has the label {own.label}={role} (or {own.label}={ANY})")
        elif not any(node.cpus >= own.cpus for node in takers):
            what.append(f"no node for {role} has {own.cpus:g} CPUs")
    places = sum(int(node.cpus / own.cpus) for node in nodes if node.role is not None or not labelled)
    if not what and places < len(roles):
        what.append(f"its nodes have {places} of {len(roles)} places with {own.cpus:g} CPUs ({', '.join(roles)})")
    return f"{'; '.join(what)}. There {listed(nodes, own.label)}" if what else ""


def listed(nodes: Sequence[ClusterNode], key: str) -> str:
    shown = [f"{node.address} ({key}={node.role or '-'}, {node.cpus:g} CPUs)" for node in nodes]
    return f"{'is' if len(nodes) == 1 else 'are'} {len(nodes)} node{'s' * (len(nodes) != 1)}: {', '.join(shown)}"


def check_facts(facts: Sequence[NodeFacts], rose: str, python: str) -> None:
    """Raise ConfigError for a node with another version of ROSE or Python than this process, which drives the run."""
    for node in facts:
        if node.rose is None:
            raise ConfigError(
                f"node {node.address} cannot import rose: its Python is {node.python}",
                hint=f"install it where Ray was started from there: pip install 'rose-rl[ray]=={rose}'",
            )
        for name, there, here in (("rose", node.rose, rose), ("Python", node.python, python)):
            if there != here:
                raise ConfigError(
                    f"node {node.address} has {name} {there}, and this machine has {here}",
                    hint="install the same on every node, and start its Ray again",
                )


def notes_of(facts: Sequence[NodeFacts], niceness: int) -> tuple[str, ...]:
    lowered = [node.address for node in facts if node.niceness > niceness]
    if not lowered:
        return ()
    where = ", ".join(lowered)
    return (
        f"Ray runs everything at a lower priority on {where}: serving may be slow beside other programs there "
        "(RAY_worker_niceness=0 in the environment of `ray start` avoids it)",
    )


def on_node(command: Command, address: str, place: Path, folders: dict[str, str], port: int | None) -> Command:
    """Return the command as it runs on a node: listening there, with the node's own folders and cores.

    `folders` has the models that were sent, by their path on the driver's machine. A `port` replaces one that is taken.
    """
    words = [str(place / folders[word]) if word in folders else word for word in command.arguments]
    if words[:2] == ["-m", "rose"] and words[2] in LISTENING:
        words += ["--host", address]
    for flag, value in (("--ledger", str(place / LEDGER)), ("--port", str(port) if port else None)):
        if flag in words and value is not None:
            words[words.index(flag) + 1] = value
    return replace(command, arguments=tuple(words))


def port_of(command: Command) -> int | None:
    words = command.arguments
    return int(words[words.index("--port") + 1]) if "--port" in words else None


def models_of(command: Command) -> dict[str, str]:
    """Return the model folders that a command names, each with its place below the folder of the process."""
    found = [word for word in command.arguments if (Path(word) / "config.json").is_file()]
    return {word: f"{MODELS}/{number}/{Path(word).name}" for number, word in enumerate(dict.fromkeys(found))}
