"""Recorded steps of a live engine, as they travel from it, and the step profile that fits them.

The constants are fitted as the device fits its own latency model (`rose.core.latency`): relative errors count, and
outliers weigh less. What outliers do is in the profile's `spread` instead: how much longer or shorter the drawn steps
took than the constants say. A simulator that draws from it has the stalls of the machine that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from rose.bounds import Count, Name, Seconds, Serial, Text
from rose.core.facts import StepFeatures
from rose.core.latency import FIT_SAMPLES_MIN, Sample, fit_constants
from rose.engines.profiles import SPREAD_PLACES, StepProfile, StepSpread
from rose.errors import ConfigError

SAMPLES_MAX = 4096  # of each kind; the recorder keeps no more
DRAWN_MIN = 200  # fewer say nothing of a P99
DIGITS = 5
SIZE_RATIO = 4.0  # of lengths in one class of the spread
CLASS_MIN = 50  # steps; fewer join the class of shorter ones

StepRow = tuple[Serial, Serial, Serial, Serial, Seconds]  # new, KV read, new x context, sequences, seconds
StepRows = Annotated[tuple[StepRow, ...], Meta(max_length=SAMPLES_MAX)]


class RecordedSide(msgspec.Struct, frozen=True):
    """What one engine of a device ran. `shapes` have steps of every kind, `drawn` are a draw from all of them."""

    side: Text
    seen: Serial
    shapes: StepRows
    drawn: StepRows
    kv_bytes_per_token: Serial
    kv_memory_bytes: Serial
    block_tokens: Count
    max_context_tokens: Count


class RecordedSteps(msgspec.Struct, frozen=True):
    """Both engines of a lent device."""

    serving: RecordedSide
    rollout: RecordedSide


def steps_of(tree: object) -> RecordedSteps:
    """Return the steps that a device answered with. Raises ConfigError for anything else."""
    try:
        return msgspec.convert(tree, RecordedSteps)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the device records other steps: {error}", hint="use its version of ROSE") from error


def rows_of(samples: Sequence[Sample]) -> tuple[StepRow, ...]:
    return tuple(
        (f.new_tokens, f.kv_read_tokens, f.new_by_context, f.sequences, seconds)
        for f, seconds in samples[-SAMPLES_MAX:]
    )


def profile_of(side: RecordedSide, name: Name, what: str) -> StepProfile:
    """Return the profile that fits the recorded steps; ConfigError says what is missing."""
    shapes, drawn = _samples(side.shapes), _samples(side.drawn)
    if len(shapes) < FIT_SAMPLES_MIN or len(drawn) < DRAWN_MIN:
        raise ConfigError(
            f"the {side.side} engine has run {side.seen:,} steps, too few for a profile",
            hint=f"record under traffic: at least {DRAWN_MIN} steps on each side (--seconds)",
        )
    constants = [_rounded(value) for value in fit_constants(shapes + drawn)]
    fixed_s, new, kv_read, new_by_context, sequences = constants
    profile = StepProfile(
        name=name, what=f"{what}, recorded beside the live engine", shape="sum", fixed_s=fixed_s,
        per_new_token_s=new, per_kv_read_token_s=kv_read, per_new_by_context_s=new_by_context,
        per_sequence_s=sequences, kv_bytes_per_token=side.kv_bytes_per_token, kv_memory_bytes=side.kv_memory_bytes,
        block_tokens=side.block_tokens, max_context_tokens=side.max_context_tokens, source={},
    )  # fmt: skip
    steps = [(profile.step_s(features), seconds) for features, seconds in drawn]
    errors = sorted(abs(seconds / predicted_s - 1) for predicted_s, seconds in steps)
    source = {
        "method": "rose profile --record: robust least squares on relative errors; compute and memory are not told "
        "apart, so weights_read_s is in fixed_s",
        "measured": f"{side.seen:,} live steps of {what}; fitted to {len(shapes)} of all shapes and {len(drawn)} drawn "
        f"ones, off by {errors[len(errors) // 2]:.1%} (median), {errors[int(0.9 * len(errors))]:.1%} (P90)",
        "spread": f"time over prediction of the drawn steps at {len(SPREAD_PLACES)} quantiles, by length",
        "kv_memory_bytes": "what the engine may hold, as it says",
    }
    return replace(profile, source=source, spread=spread_of(steps))


def spread_of(steps: Sequence[tuple[float, float]]) -> tuple[StepSpread, ...]:
    """Return how steps of (predicted, actual) seconds scatter, by classes of lengths that have enough of them."""
    by_size: dict[int, list[tuple[float, float]]] = {}
    for predicted_s, seconds in steps:
        by_size.setdefault(math.floor(math.log(predicted_s, SIZE_RATIO)), []).append(
            (predicted_s, seconds / predicted_s)
        )
    classes: list[list[tuple[float, float]]] = []
    for _, members in sorted(by_size.items()):
        if classes and len(members) < CLASS_MIN:
            classes[-1] += members
        else:
            classes.append(members)
    if len(classes) > 1 and len(classes[0]) < CLASS_MIN:
        classes[1] = classes[0] + classes[1]
        del classes[0]
    spreads = []
    for members in classes:
        ratios = sorted(ratio for _, ratio in members)
        quantiles = (ratios[min(len(ratios) - 1, int(place * len(ratios)))] for place in SPREAD_PLACES)
        spreads.append(
            StepSpread(_rounded(min(predicted_s for predicted_s, _ in members)), tuple(map(_rounded, quantiles)))
        )
    return tuple(spreads)


def _samples(rows: Sequence[StepRow]) -> list[Sample]:
    return [(StepFeatures(*map(int, row[:4])), float(row[4])) for row in rows if row[3] and 0 < row[4] < math.inf]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
