"""The seam for where the processes of a run are: this machine, or the nodes of a cluster.

The run itself (environments, trainer, progress) is always the process that the user starts. What it starts beside
itself it describes by `Command`, and a site decides on which machine that runs. On this machine that is `Processes`;
`rose.run.ray_site` starts the same commands on the nodes of a Ray cluster, and is imported only for such a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rose.device.os_process import USABLE
from rose.errors import Unavailable
from rose.run.cpu_affinity import Placement, place
from rose.run.monitor import ProcessorTime
from rose.run.processes import Command, Died, OnJson, Processes
from rose.run.publishing import Publishing
from rose.run.run_settings import RunSettings


class StartedProcess(Protocol):
    """A process that is ready; `captured` holds what its patterns matched."""

    captured: dict[str, str]


class ProcessGroup(Protocol):
    """The processes of one run, wherever they are. `failed` gets the error that ends the run."""

    failed: asyncio.Future[Unavailable]

    async def prepare(self) -> None:
        """Get ready to start processes, before this one changes its own priority and cores."""

    async def start(self, command: Command, on_json: OnJson | None = None) -> StartedProcess:
        """Start a process, and wait until it is ready. Raises Unavailable."""

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time by role, so far."""

    async def share_weights(self, publishing: Publishing) -> None:
        """Make the weights that are published reachable for workers, once `publishing` is open."""

    async def close(self) -> None:
        """Stop all processes; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class ProcessEvents:
    """What a run wants to know of its processes. `on_moved` gets a role that has another address than before."""

    on_death: Callable[[Died], None]
    on_moved: Callable[[str], None]
    say: Callable[[str], None]


class Site(Protocol):
    """The place where the processes of one run are: `open`, then `processes`, and `close` at the end."""

    async def open(self) -> Placement:
        """Return the cores by role. Raises ConfigError, Unavailable for a site that cannot hold the run."""

    def processes(self, logs: Path, secrets: Mapping[str, str], events: ProcessEvents) -> ProcessGroup: ...

    async def close(self) -> None: ...


class LocalProcesses(Processes):
    """The processes of a run on this machine, with their processor time."""

    def __init__(self, logs: Path, secrets: Mapping[str, str], on_death: Callable[[Died], None]) -> None:
        super().__init__(logs, secrets, on_death)
        self._processor_time = ProcessorTime()

    def cpu_s(self) -> dict[str, float]:
        return self._processor_time.observe(self.process_ids())

    async def share_weights(self, publishing: Publishing) -> None:
        """Do nothing: workers on this machine read the relay's folder."""


class LocalSite:
    """This machine."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings

    async def open(self) -> Placement:
        return place(self._settings, sorted(USABLE))

    def processes(self, logs: Path, secrets: Mapping[str, str], events: ProcessEvents) -> ProcessGroup:
        return LocalProcesses(logs, secrets, events.on_death)

    async def close(self) -> None:
        """Do nothing."""


def site_of(settings: RunSettings) -> Site:
    """Return where the settings want the processes. Raises ConfigError for a missing extra."""
    if settings.cluster.kind == "local":
        return LocalSite(settings)
    from rose.run.ray_site import RaySite

    return RaySite(settings)
