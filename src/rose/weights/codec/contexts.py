"""Classes of magnitude, compiled: small weights change far more often than large ones, and by more ULPs.

Each element belongs to a class by the exponent of its *base*, which the receiver has. Changes are counted within their
class: a rank is how many elements of the class come before. Bounds between classes are exponents, chosen so that every
class has about as many changes; sparser classes have longer gaps, and each class its own code. Classes are kept as one
bit per element, 64 elements in a word, one row of words per class.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rose.weights.codec.format import CLASSES, Elements
from rose.weights.codec.prefix_codes import Numbers
from rose.weights.codec.words import LANES, below, inlined, inner, ones, whole

Changes = NDArray[np.int32]
Masks = NDArray[np.int64]


@inner
def group_count(elements: int) -> int:
    return (elements + LANES - 1) // LANES


@inner
def choose_bounds(base: Elements, positions: Changes, mantissa: int, exponent: int) -> Numbers:
    """Return the bounds: class c has the exponents from bound c to before bound c + 1."""
    exponents = 1 << exponent
    counts = np.zeros(exponents, np.int64)
    for j in range(positions.shape[0]):
        counts[(whole(base[positions[j]]) >> mantissa) & (exponents - 1)] += 1
    bounds = np.zeros(CLASSES + 1, np.int64)
    passed, number = 0, 1
    for value in range(exponents):
        while number < CLASSES and passed * CLASSES >= number * positions.shape[0]:
            bounds[number] = value
            number += 1
        passed += counts[value]
    while number < CLASSES:
        bounds[number] = exponents - 1
        number += 1
    bounds[CLASSES] = exponents
    return bounds


@inner
def fill_masks(elements: Elements, bounds: Numbers, mantissa: int, exponent: int, masks: Masks) -> None:
    magnitude = (1 << (mantissa + exponent)) - 1
    groups = elements.shape[0] // LANES
    for group in range(groups):
        lower = whole(0)
        for number in range(CLASSES - 1):
            under = below(elements, group * LANES, magnitude, bounds[number + 1] << mantissa)
            masks[number, group] = under & ~lower
            lower |= under
        masks[CLASSES - 1, group] = ~lower
    if groups < masks.shape[1]:
        masks[:, groups] = 0
    for i in range(groups * LANES, elements.shape[0]):
        value = (whole(elements[i]) & magnitude) >> mantissa
        number = 0
        while number < CLASSES - 1 and value >= bounds[number + 1]:
            number += 1
        masks[number, groups] |= whole(1) << (i - groups * LANES)


@inner
def rank_changes(
    positions: Changes, steps: Changes, masks: Masks, ranks: Changes, rank_steps: Changes
) -> tuple[Numbers, Numbers]:
    """Fill ranks and steps, class after class; return where each class starts, and how many elements it has."""
    starts = np.zeros(CLASSES + 1, np.int64)
    for j in range(positions.shape[0]):
        starts[_class_of(masks, whole(positions[j])) + 1] += 1
    for number in range(CLASSES):
        starts[number + 1] += starts[number]
    following, passed, group = starts.copy(), np.zeros(CLASSES, np.int64), 0
    for j in range(positions.shape[0]):
        position = whole(positions[j])
        while group < position // LANES:
            for number in range(CLASSES):
                passed[number] += ones(masks[number, group])
            group += 1
        number = _class_of(masks, position)
        earlier = masks[number, group] & ((whole(1) << (position % LANES)) - 1)
        ranks[following[number]] = passed[number] + ones(earlier)
        rank_steps[following[number]] = steps[j]
        following[number] += 1
    while group < masks.shape[1]:
        for number in range(CLASSES):
            passed[number] += ones(masks[number, group])
        group += 1
    return starts, passed


@inlined
def _class_of(masks: Masks, position: int) -> int:
    number = 0
    while not (masks[number, position // LANES] >> (position % LANES)) & 1:
        number += 1
    return number


@inlined
def select(mask: int, rank: int) -> int:
    """Return the place of the bit that has `rank` set bits below it; the mask has more than that."""
    place, width = 0, LANES // 2
    while width:
        below_half = ones(mask & ((whole(1) << width) - 1))
        if rank >= below_half:
            rank -= below_half
            mask >>= width
            place += width
        width >>= 1
    return place
