"""What `rose run --dry-run` prints: the processes that would start, where, and what would stop the run from starting.

The plan is made from the same specifications as the run's own processes, so it cannot differ from them. Nothing is
started and nothing is written; the checks are those that `rose run` makes before it starts anything.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rose.config.schema import setting_rows
from rose.device.os_process import USABLE
from rose.errors import ConfigError
from rose.run import process_specs
from rose.run.cpu_affinity import TRAINER_NICENESS, Placement, place
from rose.run.local import check_start
from rose.run.processes import Command
from rose.run.run_settings import PROFILES, RunSettings

TRAINER = "trainer"
PLACES = {"GATEWAY_URL": "http://GATEWAY", "SERVING_URL": "http://SERVING"}  # ports are chosen at the start
MADE = "(made at the start)"


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process of the run: its role, its cores, its priority, and how it is started."""

    role: str
    cores: str
    niceness: int
    command: str


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What would be started by these settings, and what differs from the defaults of the profile."""

    folder: str
    where: str
    steps: int
    rollout_model: str
    serving_model: str
    processes: tuple[PlannedProcess, ...]
    notes: tuple[str, ...]
    changed: dict[str, object]


def plan_run(settings: RunSettings, *, is_resumed: bool = False) -> RunPlan:
    """Check what a start checks, and return what it would start. Raises ConfigError, ModelError."""
    check_start(settings)
    folder = Path(settings.runs) / (settings.name or MADE)
    if settings.name is not None and folder.exists() and not is_resumed:
        raise ConfigError(f"{folder} holds a run already", hint=f"another --name, or: rose run --resume {folder}")
    placement = place(settings, sorted(USABLE))
    on_ray = settings.cluster.kind == "ray"
    return RunPlan(
        folder=str(folder),
        where=f"Ray cluster {settings.cluster.address}, nodes by {settings.cluster.label}"
        if on_ray
        else "this machine",
        steps=settings.steps,
        rollout_model=settings.rollout_model or _warm_start(settings.environment),
        serving_model=settings.serving.preset,
        processes=tuple(_processes(settings, placement)),
        notes=("Cores are those of this machine; each node of the cluster has its own.",) * on_ray + placement.notes,
        changed=_changed(settings),
    )


def _changed(settings: RunSettings) -> dict[str, object]:
    defaults = {row.key: row.default for row in setting_rows(PROFILES[settings.profile]())}
    rows = [row for row in setting_rows(settings) if row.default != defaults[row.key]]
    return {row.key: json.loads(row.default) for row in rows}


def _warm_start(environment: str) -> str:
    from rose.train.warmstart import is_warm_start_cached

    state = "in the cache" if is_warm_start_cached(environment) else "made first, up to a minute"
    return f"warm start of {environment} ({state})"


def _processes(settings: RunSettings, placement: Placement) -> Iterator[PlannedProcess]:
    serving, rollout = Path(settings.serving.preset), Path(settings.rollout_model or "ROLLOUT_MODEL")
    gateway_url, serving_url = PLACES["GATEWAY_URL"], PLACES["SERVING_URL"]
    others = ",".join(map(str, placement.others))
    yield PlannedProcess(TRAINER, others, TRAINER_NICENESS, "this process: trainer and environments")
    gateway = process_specs.gateway(rollout, settings, placement, Path("RUN") / "ledger.db")
    yield _planned(gateway, others)
    device = process_specs.borrowed(serving, rollout, settings, placement, gateway_url)
    yield _planned(device, placement.serving)
    lender = process_specs.lender(rollout, settings, placement, gateway_url, serving_url)
    if lender is not None:
        yield _planned(lender, placement.serving)
    if placement.worker is not None:
        yield _planned(process_specs.dedicated(rollout, settings, placement, gateway_url), placement.worker)
    for command in process_specs.trainer_ranks(settings, placement, Path("RUN") / "meeting", b""):
        yield _planned(command, others)
    yield _planned(process_specs.traffic(settings, placement, serving_url), others)


def _planned(command: Command, cores: str) -> PlannedProcess:
    words = command.arguments
    text = shlex.join(("rose", *words[2:])) if words[:2] == ("-m", "rose") else f"python {shlex.join(words)}"
    return PlannedProcess(command.role, cores.removeprefix("cpu:"), command.niceness, text)
