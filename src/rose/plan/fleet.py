"""The fleet of a plan: which models run on which devices, and whether they fit.

`64xh800` are 64 devices, `qwen2.5-32b:tp4` a model on groups of four of them. A group is one serving replica, one
worker that may be borrowed, and one worker of the job's own. Profiles come from public model shapes by roofline
(`rose.engines.roofline`), or from a file that was measured on the real device.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from rose.bounds import UNREADABLE
from rose.core.slo import Budgets
from rose.engines.profiles import StepProfile, load_profile
from rose.engines.roofline import ACCELERATORS, MODELS, Accelerator, DenseModel, roofline
from rose.errors import ConfigError
from rose.sim.lent_timeline import SEQUENCES
from rose.sim.models import step_shape

GIB = 1 << 30
DEVICES_MAX = 100_000
DEGREES = (1, 2, 4, 8, 16)
CONTEXTS_MIN = 4  # full contexts that the KV memory beside both models must hold
BUDGET_MS_MAX = 600_000.0

DeviceCount = Annotated[int, Meta(ge=0, le=DEVICES_MAX)]
Milliseconds = Annotated[float, Meta(gt=0, le=BUDGET_MS_MAX)]


class FleetInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user says of a fleet."""

    devices: Annotated[str, Meta(max_length=64)] = "64xh800"
    serving: Annotated[str, Meta(max_length=64)] = "qwen2.5-32b"
    rollout: Annotated[str, Meta(max_length=64)] = "qwen3-32b"
    dedicated: DeviceCount = 16
    train_gpus: DeviceCount = 32
    ttft_ms: Milliseconds = 1000.0
    tpot_ms: Milliseconds = 450.0
    answer_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Devices in groups of `degree`; `replicas` groups serve, and `dedicated` groups are the job's own."""

    accelerator: Accelerator
    devices: int
    degree: int
    serving: StepProfile
    rollout: StepProfile
    rollout_weights_bytes: int
    memory_bytes: int  # of a group, for the KV of both models
    dedicated: int
    train_devices: int
    budgets: Budgets
    notes: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        return self.devices // self.degree


def fleet_of(inputs: FleetInputs, serving_file: Path | None = None, rollout_file: Path | None = None) -> Fleet:
    """Return the fleet; ConfigError says what does not fit, or which budget no request can meet."""
    count, accelerator = _devices(inputs.devices)
    (serving, degree), (rollout, own) = _model(inputs.serving), _model(inputs.rollout)
    degree = degree or own or _smallest_degree(accelerator, serving, rollout)
    if own and own != degree:
        what = f"a borrowed device runs both models on the same group, but serving has tp{degree} and rollouts tp{own}"
        raise ConfigError(what, hint=f"give --rollout {rollout.name.lower()}:tp{degree}, or leave the degree out")
    if count < degree:
        have = "1 device is" if count == 1 else f"{count} devices are"
        what = f"{have} less than one group of {degree}, which both models need"
        raise ConfigError(what, hint="give more --devices, or smaller models")
    memory_bytes = check_memory(accelerator, degree, serving, rollout)
    notes = []
    if left := count % degree:
        notes.append(f"{left} of {count} devices are left over: groups have {degree}")
    if left := inputs.dedicated % degree:
        notes.append(f"{left} of {inputs.dedicated} dedicated devices are left over: groups have {degree}")
    profiles = [
        replace(roofline(accelerator, model, degree), name=f"{accelerator.short_name}-{model.name.lower()}-tp{degree}")
        if file is None
        else load_profile(file)
        for model, file in ((serving, serving_file), (rollout, rollout_file))
    ]
    budgets = Budgets(inputs.ttft_ms / 1000, inputs.tpot_ms / 1000, answer_s=inputs.answer_s)
    check_budgets(profiles[0], budgets)
    return Fleet(
        accelerator, count - count % degree, degree, profiles[0], profiles[1], rollout.weights_bytes, memory_bytes,
        inputs.dedicated // degree, inputs.train_gpus, budgets, tuple(notes),
    )  # fmt: skip


def inputs_of(**values: object) -> FleetInputs:
    """Return checked inputs; None stands for the default."""
    try:
        return msgspec.convert({name: value for name, value in values.items() if value is not None}, FleetInputs)
    except UNREADABLE as error:
        raise ConfigError(f"this is no fleet: {error}", hint="`rose plan --help` has an example") from error


def check_memory(accelerator: Accelerator, degree: int, serving: DenseModel, rollout: DenseModel) -> int:
    """Return the bytes for KV beside the weights of both models."""
    usable = accelerator.usable_memory_bytes * degree
    left = int(usable - serving.weights_bytes - rollout.weights_bytes)
    longest = 32_768 * max(serving.kv_bytes_per_token, rollout.kv_bytes_per_token)
    if left >= CONTEXTS_MIN * longest:
        return left
    have = f"{degree} x {accelerator.name} {'has' if degree == 1 else 'have'} {usable / GIB:.1f} GiB to use"
    need = " and ".join(f"{model.name} takes {model.weights_bytes / GIB:.1f} GiB" for model in (serving, rollout))
    what = f"{have}; {need}; KV memory for {CONTEXTS_MIN} full contexts takes {CONTEXTS_MIN * longest / GIB:.1f} GiB"
    raise ConfigError(f"the models do not fit: {what}", hint="raise the degree (:tp8), or choose smaller models")


def check_budgets(serving: StepProfile, budgets: Budgets) -> None:
    """Refuse budgets that a request alone on the device cannot meet."""
    decode_s, prefill_s = (serving.step_s(step_shape(tokens, 0, 1)) for tokens in (1, 128))
    for option, budget_s, least_s in (("tpot", budgets.tpot_s, decode_s), ("ttft", budgets.ttft_s, prefill_s)):
        if budget_s < least_s:
            what = "a decode step" if option == "tpot" else "a prompt of 128 tokens"
            raise ConfigError(
                f"serving alone cannot meet --{option}-ms {budget_s * 1000:g}: {what} takes {least_s * 1000:.1f} ms on "
                f"{serving.name} with nothing beside it",
                hint=f"give at least --{option}-ms {least_s * 2000:.0f}",
            )


def capacity_note() -> str:
    return f"each replica runs at most {SEQUENCES} requests at once, in steps of 512 tokens"


def _devices(text: str) -> tuple[int, Accelerator]:
    match = re.fullmatch(r"(?:(\d{1,6})x)?([a-z0-9.-]+)", text.strip().lower())
    if not match:
        raise ConfigError(f"`{text}` names no devices", hint="write them as 64xh800")
    count = int(match[1] or 1)
    if not 1 <= count <= DEVICES_MAX:
        raise ConfigError(f"{count} devices cannot be planned for", hint=f"give 1 to {DEVICES_MAX:,}")
    if match[2] not in ACCELERATORS:
        raise ConfigError(f"there is no device `{match[2]}`", hint=_nearest(match[2], ACCELERATORS))
    return count, ACCELERATORS[match[2]]


def _model(text: str) -> tuple[DenseModel, int]:
    """Return the model, and its tensor-parallel degree or 0."""
    name, _, degree = text.strip().lower().partition(":")
    if name not in MODELS:
        raise ConfigError(f"there is no model `{name}`", hint=_nearest(name, MODELS))
    if not degree:
        return MODELS[name], 0
    known = {f"tp{one}": one for one in DEGREES}
    if degree not in known:
        raise ConfigError(f"`{degree}` is no tensor-parallel degree", hint=f"write one of {', '.join(known)}")
    return MODELS[name], known[degree]


def _smallest_degree(accelerator: Accelerator, serving: DenseModel, rollout: DenseModel) -> int:
    for degree in DEGREES[:-1]:
        try:
            check_memory(accelerator, degree, serving, rollout)
        except ConfigError:
            continue
        return degree
    return DEGREES[-1]


def _nearest(typed: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(typed, names, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}known: {', '.join(names)}"
