"""A Ray cluster as the site of a run: connects to it, finds a node for every role, and checks the nodes.

Ray places processes, notices lost nodes and carries model folders and logs. Nothing of a turn goes through it: workers
dial the gateway, and weights come from a relay beside the trainer. No secret goes through it in the clear, so neither
its dashboard nor its logs can show one (`rose.run.sealed_secrets`); environment variables of Ray's `runtime_env` are
not used.

The driver is an ordinary process on a node, or a job of `ray job submit`. Everything that a cluster may lack is said
within seconds, before the run has a folder. Ray's calls wait for long, so they run in threads of their own, with
limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import rose
from rose.device.os_process import USABLE
from rose.errors import ConfigError, Unavailable
from rose.run.cpu_affinity import Placement, place
from rose.run.process_site import ProcessEvents, ProcessGroup
from rose.run.ray_placement import (
    ClusterNode,
    NodeFacts,
    check_facts,
    is_labelled,
    listed,
    missing,
    notes_of,
    roles_of,
    selectors,
)
from rose.run.run_settings import RunSettings
from rose.weights.relay.relay_api import split_address

DIAL_S, CONNECT_S, PROBE_S, CLOSE_S = 2.0, 5.0, 8.0, 10.0
LOOK_S = 0.5  # between two looks at the nodes, while some are missing
INSTALL = f"pip install 'rose-rl[ray]=={rose.__version__}', here and on every node"
ON_A_NODE = "run it on a node of the cluster, or from anywhere: ray job submit -- rose run --on ray"
Result = TypeVar("Result")


class RaySite:
    """The nodes of one Ray cluster."""

    def __init__(self, settings: RunSettings) -> None:
        """Raises ConfigError if Ray is not installed."""
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise ConfigError("Ray is not installed", hint=INSTALL) from error
        self._settings, self._own = settings, settings.cluster
        self._group: Any = None

    async def open(self) -> Placement:
        await self._connect()
        nodes = await self._nodes()
        facts = await self._probe(nodes)
        check_facts(facts, rose.__version__, platform.python_version())
        await self._reserve(nodes)
        cores = sorted(USABLE.union(*(node.cores for node in facts)))
        found = place(self._settings, cores)
        own = tuple(core for core in found.others if core in USABLE)
        notes = (*found.notes, *notes_of(facts, os.getpriority(os.PRIO_PROCESS, 0)))
        return Placement(found.serving, found.worker, own or tuple(sorted(USABLE)), notes)

    def processes(self, logs: Path, secrets: Mapping[str, str], events: ProcessEvents) -> ProcessGroup:
        from rose.run.ray_processes import RayProcesses

        return RayProcesses(self._group, roles_of(self._settings), logs, secrets, events)

    async def close(self) -> None:
        """Leave the cluster; Ray ends what it still has of this run."""
        import ray

        with contextlib.suppress(Unavailable):
            await in_thread(ray.shutdown, CLOSE_S, "Ray did not let go")

    async def _connect(self) -> None:
        """Join the cluster as a driver. Raises ConfigError, Unavailable."""
        import ray

        address = self._own.address
        if "://" in address:
            raise ConfigError(f"`{address}` is an address for Ray's client, which has no node here", hint=ON_A_NODE)
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS", address)
        if address != "auto":
            await in_thread(lambda: _dial(address), DIAL_S + 1, f"no Ray cluster answers at {address}")

        def join() -> None:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")

        try:
            await in_thread(join, CONNECT_S, f"what answers at {address} is no Ray cluster that lets this process in")
        except Unavailable:
            raise
        except Exception as error:
            what = str(error).strip().splitlines() or [type(error).__name__]
            raise Unavailable(
                f"this process cannot join the Ray cluster at {address}: {' '.join(what)[:600]}", hint=ON_A_NODE
            ) from error

    async def _nodes(self) -> list[ClusterNode]:
        """Return the nodes once they can hold the run. Raises Unavailable."""
        deadline_s = asyncio.get_running_loop().time() + self._own.wait_s
        while True:
            nodes = await in_thread(self._alive, CONNECT_S, "Ray does not tell its nodes")
            if not (what := missing(nodes, roles_of(self._settings), self._own)):
                return nodes
            if asyncio.get_running_loop().time() > deadline_s:
                key = self._own.label
                hint = f"start nodes with `ray start --address ADDRESS --labels {key}=ROLE`, or wait for them: "
                raise Unavailable(f"the Ray cluster cannot hold the run: {what}", hint=f"{hint}cluster.wait_s=600")
            await asyncio.sleep(LOOK_S)

    def _alive(self) -> list[ClusterNode]:
        import ray

        return [
            ClusterNode(
                node["NodeID"],
                node["NodeManagerAddress"],
                node.get("Labels", {}).get(self._own.label),
                node["Resources"].get("CPU", 0.0),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    async def _probe(self, nodes: Sequence[ClusterNode]) -> list[NodeFacts]:
        """Return what the nodes that may be used say of themselves. Raises Unavailable."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        used = [node for node in nodes if node.role is not None or not is_labelled(nodes)]
        ask = ray.remote(probe())
        asked = [
            ask.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.name, soft=False)).remote()
            for node in used
        ]
        told = await in_thread(lambda: ray.get(asked, timeout=PROBE_S), PROBE_S + 1, "some node of Ray does not answer")
        return [NodeFacts(node.address, *facts) for node, facts in zip(used, told)]

    async def _reserve(self, nodes: Sequence[ClusterNode]) -> None:
        """Reserve a place for every role. Raises Unavailable if other jobs have them all."""
        import ray

        roles, own = roles_of(self._settings), self._own
        bundles = [{"CPU": own.cpus} for _ in roles]
        self._group = ray.util.placement_group(
            bundles, "SPREAD", bundle_label_selector=selectors(nodes, roles, own.label)
        )
        if not await in_thread(lambda: self._group.wait(own.wait_s), own.wait_s + CONNECT_S, "Ray places nothing"):
            what = f"other jobs of the Ray cluster have what this run needs: {own.cpus:g} CPUs for each of "
            raise Unavailable(f"{what}{', '.join(roles)}. There {listed(nodes, own.label)}", hint="ray status")


def probe() -> Callable[[], tuple[str | None, str, tuple[int, ...], int]]:
    """Return what runs on every node. It travels whole, so that it also runs where ROSE is another or missing."""

    def facts() -> tuple[str | None, str, tuple[int, ...], int]:
        import contextlib
        import os
        import platform

        version: str | None = None
        with contextlib.suppress(ImportError):
            from rose import __version__ as version
        return version, platform.python_version(), tuple(sorted(os.sched_getaffinity(0))), os.getpriority(0, 0)

    return facts


def _dial(address: str) -> None:
    """Raise Unavailable unless something listens there."""
    try:
        socket.create_connection(split_address(address), timeout=DIAL_S).close()
    except OSError as error:
        hint = "start one: ray start --head; or name another: --set cluster.address=HOST:PORT"
        raise Unavailable(f"no Ray cluster answers at {address}: {error.strerror or error}", hint=hint) from error


async def in_thread(work: Callable[[], Result], limit_s: float, what: str) -> Result:
    """Return the result of work that may hang; its thread does not keep this process alive. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="ray", daemon=True).start()
    try:
        async with asyncio.timeout(limit_s):
            return await done
    except TimeoutError as error:
        raise Unavailable(f"{what} within {limit_s:g} s", hint="ray status") from error
