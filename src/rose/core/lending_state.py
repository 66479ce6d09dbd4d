"""How a device should be lent, how it is lent, and what follows from both. One set of rules for every kind of engine.

The desired state is what the operator commands and what the gateway has work for; it outlives engines. The actual state
is what the adapter of an engine reports. `reconcile` joins the two: the state to show, why no step may run, and where
the rollout model should be. A reason is data (`Stop`): its cause decides, its text is for people only.

Commands are rows of `TRANSITIONS`. A failure is final: the operator has to restart the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import Literal

from rose.errors import RequestRefused

Residency = Literal["resident", "parked", "absent"]  # weights and KV memory; weights alone; neither
OUTWARD: tuple[Residency, ...] = ("resident", "parked", "absent")
RESTART = "restart the device to lend it again"


class LendingState(StrEnum):
    """What clients, the gateway and `rose lend` see."""

    LENDING = "lending"
    PAUSED = "paused"
    DRAINED = "drained"
    PARKED = "parked"
    DRY_RUN = "dry_run"
    ACTIVATING = "activating"
    FAILED = "failed"


class StopCause(Enum):
    """What stopped lending until the operator resumes it."""

    PAUSE = auto()
    DRAIN = auto()
    REMOVE = auto()
    HELD_BACK = auto()  # engines died soon after they were lent
    FAILURE = auto()  # the rollout model's own code failed


@dataclass(frozen=True, slots=True)
class Stop:
    cause: StopCause
    text: str  # for people

    @property
    def is_final(self) -> bool:
        return self.cause is StopCause.FAILURE


PAUSED = Stop(StopCause.PAUSE, "paused by the owner")
DRAINED = Stop(StopCause.DRAIN, "drained by the owner")
REMOVED = Stop(StopCause.REMOVE, DRAINED.text)


@dataclass(frozen=True, slots=True)
class DesiredLending:
    """What the operator and the gateway want. `residency` is the most that the operator allows."""

    stop: Stop | None = None
    residency: Residency = "resident"
    is_wanted: bool = True  # the gateway has work for the rollout model
    is_dry_run: bool = False
    memory_share: float = 1.0
    compute_share: float = 1.0
    resumes: int = 0  # grows with every `resume`; then the circuit breaker starts afresh


@dataclass(frozen=True, slots=True)
class ActualLending:
    """What an adapter reports of its engine."""

    residency: Residency = "resident"
    is_loading: bool = False
    has_engine: bool = True
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What follows. Rollout steps may run only without `stop` and with `residency` "resident"."""

    state: LendingState
    stop: Stop | None
    residency: Residency  # where the rollout model should be


@dataclass(frozen=True, slots=True)
class Transition:
    """What a command changes; None leaves a field as it is."""

    stop: Stop | None = None
    residency: Residency | None = None
    is_dry_run: bool | None = None
    is_resume: bool = False


TRANSITIONS: Mapping[str, Transition] = {
    "pause": Transition(PAUSED),  # requests and memory stay, so that `resume` continues where it stopped
    "drain": Transition(DRAINED, "parked"),
    "remove": Transition(REMOVED, "absent"),
    "resume": Transition(residency="resident", is_dry_run=False, is_resume=True),
    "dry_run": Transition(is_dry_run=True),  # adds to any stop, which still holds
    "limits": Transition(),
    "status": Transition(),
}


def after_command(
    desired: DesiredLending, action: str, memory_share: float | None = None, compute_share: float | None = None
) -> DesiredLending:
    """Return the desired state after an operator's command. Raises RequestRefused, and nothing has changed."""
    for name, share in (("memory", memory_share), ("compute", compute_share)):
        if share is not None and not 0 <= share <= 1:
            raise RequestRefused(f"{name} limit must be between 0 and 1, got {share}", hint="give a share from 0 to 1")
    change = TRANSITIONS[action]
    if desired.stop is not None and desired.stop.is_final and (change.is_resume or change.is_dry_run):
        raise RequestRefused(desired.stop.text, hint=RESTART)
    if change.is_resume:
        desired = replace(desired, stop=None, residency="resident", resumes=desired.resumes + 1)
    if change.stop is not None:
        desired = with_stop(desired, change.stop, change.residency or "resident")
    if change.is_dry_run is not None:
        desired = replace(desired, is_dry_run=change.is_dry_run)
    if action == "limits" and memory_share is not None:
        desired = replace(desired, memory_share=memory_share)
    if action == "limits" and compute_share is not None:
        desired = replace(desired, compute_share=compute_share)
    return desired


def with_stop(desired: DesiredLending, stop: Stop, residency: Residency = "resident") -> DesiredLending:
    """Return the desired state with lending stopped. A stop never loads a model again, nor replaces a failure."""
    if desired.stop is not None and desired.stop.is_final:
        return desired
    return replace(
        desired,
        stop=stop,
        residency=_further_out(desired.residency, residency),
        is_dry_run=desired.is_dry_run and not stop.is_final,
    )


def reconcile(desired: DesiredLending, actual: ActualLending) -> Reconciled:
    """Return what follows from the desired and the actual state."""
    stop = Stop(StopCause.FAILURE, actual.failure) if actual.failure else desired.stop
    target: Residency = "absent" if stop is not None and stop.is_final else desired.residency
    if not desired.is_wanted:
        target = _further_out(target, "parked")
    return Reconciled(_state(desired, actual, stop), stop, target)


def _state(desired: DesiredLending, actual: ActualLending, stop: Stop | None) -> LendingState:
    if stop is not None and stop.is_final:
        return LendingState.FAILED
    if not actual.has_engine:
        return LendingState.ACTIVATING
    if stop is not None:
        return LendingState.PAUSED if stop.cause is StopCause.PAUSE else LendingState.DRAINED
    if actual.is_loading:
        return LendingState.ACTIVATING
    if not desired.is_wanted:
        return LendingState.PARKED
    if actual.residency != "resident":
        return LendingState.DRAINED
    return LendingState.DRY_RUN if desired.is_dry_run else LendingState.LENDING


def _further_out(one: Residency, other: Residency) -> Residency:
    return max(one, other, key=OUTWARD.index)
