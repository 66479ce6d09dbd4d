"""Step profiles: how long a step takes on a device that is not here, by constants per (device, model) in JSON files.

    compute = per_new_token_s x new_tokens + per_new_by_context_s x new_by_context + per_sequence_s x sequences
    memory  = weights_read_s + per_kv_read_token_s x kv_read_tokens
    step    = fixed_s + per_new_token_exchange_s x new_tokens + (compute + memory, or the larger of the two)

A measured profile adds compute and memory: on one core they do not overlap. A `roofline` profile takes the larger one:
an accelerator reads while it computes. The file's `source` says where every constant comes from. A tensor-parallel
group counts as one device. A profile recorded beside a live engine (`rose profile`) also has the `spread` of its steps.
"""

from __future__ import annotations

import difflib
import random
from bisect import bisect_left
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rose.bounds import Count, Name, Seconds, Serial, Text
from rose.core.facts import StepFeatures
from rose.errors import ConfigError

FOLDER = Path(__file__).parent
SOURCES_MAX = 256  # more than one per constant
SPREAD_PLACES = (0.005, *(n / 50 for n in range(1, 46)), 0.92, 0.94, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
PROFILE_BYTES_MAX = 1 << 20  # the ones that ship have a few kilobytes


@dataclass(frozen=True, slots=True)
class StepSpread:
    """How steps of at least `from_s` scatter: their time over `step_s`, at the quantiles of SPREAD_PLACES.

    Short steps scatter more than long ones: a process that takes the core for a moment multiplies a short step.
    """

    from_s: Seconds
    ratios: Annotated[tuple[Seconds, ...], Meta(max_length=len(SPREAD_PLACES))]

    def draw(self, chance: random.Random) -> float:
        place, values = chance.random(), self.ratios
        at = bisect_left(SPREAD_PLACES, place)
        if at == 0:
            return values[0]
        low, high = SPREAD_PLACES[at - 1], SPREAD_PLACES[at]
        return values[at - 1] + (values[at] - values[at - 1]) * (place - low) / (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The step costs and memory of one device with one model."""

    name: Name
    what: Text
    shape: Literal["sum", "roofline"]
    fixed_s: Seconds
    per_new_token_s: Seconds
    per_kv_read_token_s: Seconds
    per_new_by_context_s: Seconds
    per_sequence_s: Seconds
    weights_read_s: Seconds = 0.0
    per_new_token_exchange_s: Seconds = 0.0
    tensor_parallel: Count = 1
    kv_bytes_per_token: Serial
    kv_memory_bytes: Serial
    block_tokens: Count
    max_context_tokens: Count
    spread: Annotated[tuple[StepSpread, ...], Meta(max_length=16)] = ()  # by length, the shortest first; or none
    source: Annotated[dict[Name, Text], Meta(max_length=SOURCES_MAX)]

    def __post_init__(self) -> None:
        for constant in fields(self):
            value = getattr(self, constant.name)
            if isinstance(value, int | float) and not 0 <= value < float("inf"):
                raise ConfigError(f"profile {self.name}: {constant.name} is {value}, which is no cost")
        if min(self.kv_bytes_per_token, self.block_tokens, self.tensor_parallel, self.kv_blocks) < 1:
            raise ConfigError(
                f"profile {self.name}: its KV memory does not hold one block",
                hint="check kv_memory_bytes, kv_bytes_per_token, block_tokens and tensor_parallel",
            )

        begins = [one.from_s for one in self.spread]
        if begins != sorted(begins) or any(
            len(one.ratios) != len(SPREAD_PLACES) or list(one.ratios) != sorted(one.ratios) for one in self.spread
        ):
            raise ConfigError(
                f"profile {self.name}: its spread is not in order",
                hint=f"{len(SPREAD_PLACES)} quantiles a class, from the smallest; the shortest steps come first",
            )

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_per_token

    @property
    def kv_blocks(self) -> int:
        return self.kv_memory_bytes // max(1, self.block_bytes)

    def step_s(self, features: StepFeatures) -> float:
        """Return the duration of a step of this shape; an empty step takes no time."""
        if features.sequences == 0:
            return 0.0
        compute_s = (
            self.per_new_token_s * features.new_tokens
            + self.per_new_by_context_s * features.new_by_context
            + self.per_sequence_s * features.sequences
        )
        memory_s = self.weights_read_s + self.per_kv_read_token_s * features.kv_read_tokens
        work_s = max(compute_s, memory_s) if self.shape == "roofline" else compute_s + memory_s
        return self.fixed_s + self.per_new_token_exchange_s * features.new_tokens + work_s


def noise_of(profile: StepProfile, seconds: float, chance: random.Random, sigma: float) -> float:
    """Draw by how much a step of about this length takes longer: from the spread, or log-normal without one."""
    if not profile.spread:
        return chance.lognormvariate(0, sigma)
    own = profile.spread[0]
    for one in profile.spread:
        if one.from_s <= seconds:
            own = one
    return own.draw(chance)


def profile_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name_or_path: str | Path) -> StepProfile:
    """Return a profile that ships with ROSE, by name, or any file of the same format, by path."""
    path = Path(name_or_path)
    if path.suffix != ".json" and path.name == str(name_or_path):
        path = FOLDER / f"{name_or_path}.json"
    try:
        with path.open("rb") as file:
            text = file.read(PROFILE_BYTES_MAX + 1)
    except (FileNotFoundError, IsADirectoryError) as error:
        known = profile_names()
        nearest = difflib.get_close_matches(str(name_or_path), known, n=1, cutoff=0.0)
        hint = f"did you mean {nearest[0]!r}? known: {', '.join(known)}" if nearest else None
        raise ConfigError(f"there is no step profile {str(name_or_path)!r}", hint=hint) from error
    if len(text) > PROFILE_BYTES_MAX:
        raise ConfigError(f"{path} is not a step profile: it has more than {PROFILE_BYTES_MAX} bytes")
    try:
        document: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        names = {constant.name for constant in fields(StepProfile)}
        for key in document.keys() - names:
            nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            raise ConfigError(f"{path}: unknown key {key!r}", hint=f"did you mean {nearest[0]!r}?")
        return msgspec.convert(document, StepProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        hint = "compare it with the ones ROSE ships"
        raise ConfigError(f"{path} is not a step profile: {error}", hint=hint) from error


def write_profile(profile: StepProfile, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
