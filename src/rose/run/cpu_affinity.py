"""Cores and priorities of the processes of a run.

Serving goes first: its device has a core for itself, at the usual priority. Everything else shares the other cores:
the control plane at a lower priority, trainer and dedicated worker at the lowest. On a machine with one core the
serving device is the only worker, and the run says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rose.config.server_settings import cores_of
from rose.errors import ConfigError
from rose.run.run_settings import RunSettings

SERVING_NICENESS, CONTROL_NICENESS, TRAINER_NICENESS = 0, 5, 10


@dataclass(frozen=True, slots=True)
class Placement:
    """Cores by role; `others` are those of everything but the engines. Without a `worker` there is no dedicated one."""

    serving: str
    worker: str | None
    others: tuple[int, ...]
    notes: tuple[str, ...] = ()


def place(settings: RunSettings, usable: Sequence[int]) -> Placement:
    """Return the cores by role. Raises ConfigError for cores that are not there."""
    cores = tuple(sorted(usable))
    serving = settings.serving.device or f"cpu:{cores[0]}"
    _check(serving, "serving.device", cores)
    left = tuple(core for core in cores if core not in cores_of(serving))
    if not settings.worker.is_used:
        return Placement(serving, None, left or cores)
    if settings.worker.device is not None:
        _check(settings.worker.device, "worker.device", cores)
        return Placement(serving, settings.worker.device, left or cores, _shared(serving, settings.worker.device))
    if left:
        return Placement(serving, f"cpu:{left[0]}", left)
    return _on_one_core(settings, serving, cores)


def _on_one_core(settings: RunSettings, serving: str, cores: tuple[int, ...]) -> Placement:
    if settings.compare or not settings.serving.is_borrowed:
        why = "compares with a dedicated worker" if settings.compare else "borrows no device"
        raise ConfigError(
            f"this run {why}, which needs a second core; this process may use only {serving}",
            hint="run it where there are two cores, or leave out --compare and borrow the device",
        )
    notes = (
        f"There is one core here ({serving}): no dedicated worker, the serving device plays every rollout beside its "
        "own users, and the trainer has what is left. It works, slowly; two cores are better.",
    )
    return Placement(serving, None, cores, notes)


def _check(device: str, key: str, cores: tuple[int, ...]) -> None:
    missing = [core for core in cores_of(device) if core not in cores]
    if missing:
        shown = ", ".join(map(str, cores))
        what = f"{key} is {device}, but this process may use only core{'s' if len(cores) > 1 else ''} {shown}"
        raise ConfigError(what, hint=f"for example --set {key}=cpu:{cores[0]}")


def _shared(serving: str, worker: str) -> tuple[str, ...]:
    shared = sorted(set(cores_of(serving)) & set(cores_of(worker)))
    if not shared:
        return ()
    return (f"serving and the dedicated worker share core {shared[0]}: neither will be quick",)
