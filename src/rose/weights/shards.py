"""Which rank holds which part of which tensor, and how the parts are cut into chunks.

A *region* is a rectangular slice of a logical tensor. A *placement* says that a rank keeps a region in one of its local
tensors, at an offset: fused, split, padded, tied and flattened tensors are all described this way. A *layout* is the
placements of every rank (`weights.layouts` makes them).

`plan` cuts the regions of the trainer's ranks along every edge of any worker's region. So each chunk lies inside one
trainer rank's shard, and inside or outside every worker's: a rank encodes its own chunks alone, and a worker fetches
exactly its own. Of several ranks that hold a chunk, one pushes it, chosen so that the bytes are spread evenly.
Everything is computed from the layouts alone, and equally on every rank.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError

CHUNK_ELEMENTS_MAX = 64 << 20  # 128 MiB of bf16: small enough to encode, push, pull and decode side by side
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}

Point = tuple[int, ...]
Array = NDArray[Any]


class LayoutError(ConfigError):
    """Layouts that do not fit the tensors or each other."""


@dataclass(frozen=True, slots=True, order=True)
class Tensor:
    """A logical tensor, as a model folder names it; `dtype` is BF16, F16 or F32."""

    name: str
    shape: Point
    dtype: str = "BF16"

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def whole(self) -> TensorRegion:
        return TensorRegion(self.name, (0,) * len(self.shape), self.shape)


@dataclass(frozen=True, slots=True, order=True)
class TensorRegion:
    """A rectangular slice of a tensor, from `start` up to `stop`."""

    tensor: str
    start: Point
    stop: Point

    @property
    def shape(self) -> Point:
        return tuple(stop - start for start, stop in zip(self.start, self.stop))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def is_within(self, other: TensorRegion) -> bool:
        return (
            self.tensor == other.tensor
            and all(mine >= theirs for mine, theirs in zip(self.start, other.start))
            and all(mine <= theirs for mine, theirs in zip(self.stop, other.stop))
        )

    def meet(self, other: TensorRegion) -> TensorRegion | None:
        """Return the part that both have, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        is_common = self.tensor == other.tensor and all(first < last for first, last in zip(start, stop))
        return TensorRegion(self.tensor, start, stop) if is_common else None

    def slices(self, inside: TensorRegion) -> tuple[slice, ...]:
        """Return the index of this region in an array of the other, which holds all of it."""
        assert self.is_within(inside), f"{self} is not within {inside}"
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, inside.start))


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """The place of a region in a rank's tensor `local`, from `offset` on; one run of numbers if that tensor is flat."""

    region: TensorRegion
    local: str
    local_shape: Point
    offset: Point
    is_flat: bool = False

    def view(self, array: Array, chunk: TensorRegion | None = None) -> Array:
        """Return the region, or a chunk of it, as a view of the rank's own array."""
        if array.shape != self.local_shape:
            raise LayoutError(f"`{self.local}` has shape {array.shape} here; its layout says {self.local_shape}")
        if self.is_flat:
            mine = array[self.offset[0] : self.offset[0] + self.region.elements].reshape(self.region.shape)
        else:
            index = tuple(slice(first, first + size) for first, size in zip(self.offset, self.region.shape))
            mine = _part(array, index)
        return mine if chunk is None else _part(mine, chunk.slices(self.region))


def _part(array: Array, index: tuple[slice, ...]) -> Array:
    where: tuple[Any, ...] = (*index, ...)  # without the dots, a single number would be copied
    part: Array = array[where]
    return part


Placements = Sequence[ShardPlacement]
Layout = Sequence[Placements]  # by rank


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The chunks, in order of tensor and position, and the trainer rank that pushes each."""

    chunks: tuple[TensorRegion, ...]
    owners: tuple[int, ...]

    def chunks_of(self, rank: int) -> list[TensorRegion]:
        return [chunk for chunk, owner in zip(self.chunks, self.owners) if owner == rank]


def plan(
    tensors: Sequence[Tensor],
    trainer: Layout,
    workers: Iterable[Layout] = (),
    *,
    chunk_elements_max: int = CHUNK_ELEMENTS_MAX,
) -> ShardPlan:
    """Cut the trainer's regions into chunks such that every rank of every worker layout needs whole chunks only."""
    edges = _edges(placement.region for layout in workers for placements in layout for placement in placements)
    holders = _holders(trainer)
    chunks: dict[TensorRegion, set[int]] = {}
    for region, ranks in holders.items():
        for cell in _cut(region, edges[region.tensor]):
            for chunk in _rows(cell, chunk_elements_max):
                chunks[chunk] = ranks
    ordered = sorted(chunks)
    check_cover(tensors, ordered)
    item_bytes = {tensor.name: ITEM_BYTES[tensor.dtype] for tensor in tensors}
    return ShardPlan(tuple(ordered), _owners(ordered, chunks, item_bytes))


def places(chunks: Iterable[TensorRegion], placements: Placements) -> list[tuple[TensorRegion, ShardPlacement]]:
    """Return the chunks that a rank needs, each once for every place it has there (tied tensors have two).

    Raises LayoutError if a chunk straddles the rank's edge or the chunks do not fill what it holds.
    """
    by_tensor: dict[str, list[TensorRegion]] = defaultdict(list)
    for chunk in chunks:
        by_tensor[chunk.tensor].append(chunk)
    found: list[tuple[TensorRegion, ShardPlacement]] = []
    for placement in placements:
        missing = placement.region.elements
        for chunk in by_tensor[placement.region.tensor]:
            if chunk.meet(placement.region) is None:
                continue
            if not chunk.is_within(placement.region):
                raise LayoutError(
                    f"the published chunks of `{chunk.tensor}` are not cut where `{placement.local}` begins or ends",
                    hint="name this worker's tensor-parallel degree in the trainer's settings",
                )
            found.append((chunk, placement))
            missing -= chunk.elements
        if missing:
            raise LayoutError(
                f"{missing} numbers of `{placement.region.tensor}` that `{placement.local}` needs are not published"
            )
    return found


def check_cover(tensors: Sequence[Tensor], regions: Sequence[TensorRegion]) -> None:
    """Raise LayoutError unless every number of every tensor lies in exactly one region."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    if len(shapes) < len(tensors):
        raise LayoutError("two tensors have the same name")
    by_tensor: dict[str, list[TensorRegion]] = {name: [] for name in shapes}
    for region in regions:
        shape = shapes.get(region.tensor)
        if shape is None:
            raise LayoutError(f"a chunk of `{region.tensor}`, which is not among the tensors")
        has_rank = len(region.start) == len(region.stop) == len(shape)
        if not has_rank or any(not 0 <= a < b <= n for a, b, n in zip(region.start, region.stop, shape)):
            where = f"{list(region.start)} to {list(region.stop)}"
            raise LayoutError(f"{where} is no part of `{region.tensor}`, which is {list(shape)}")
        by_tensor[region.tensor].append(region)
    for name, shape in shapes.items():
        covered = sum(region.elements for region in by_tensor[name])
        if _overlap(by_tensor[name]):
            raise LayoutError(f"two chunks of `{name}` overlap")
        if covered != math.prod(shape):
            raise LayoutError(f"the chunks of `{name}` cover {covered} of its {math.prod(shape)} numbers")


def _overlap(regions: Sequence[TensorRegion]) -> bool:
    """Return whether any two have a number in common. Only regions whose rows meet are compared."""
    if len(regions) < 2 or not regions[0].start:
        return len(regions) > 1
    ordered = sorted(regions, key=lambda region: region.start)
    starts = np.array([region.start for region in ordered])
    stops = np.array([region.stop for region in ordered])
    for index in range(len(ordered) - 1):
        last = np.searchsorted(starts[:, 0], stops[index, 0], side="left")
        later = slice(index + 1, last)
        if np.any(np.all((starts[later] < stops[index]) & (stops[later] > starts[index]), axis=1)):
            return True
    return False


def _edges(regions: Iterable[TensorRegion]) -> Mapping[str, list[set[int]]]:
    """Return where regions begin or end along each axis of each tensor."""
    found: dict[str, list[set[int]]] = defaultdict(list)
    for region in regions:
        axes = found[region.tensor]
        axes.extend(set() for _ in range(len(region.start) - len(axes)))
        for axis, ends in enumerate(zip(region.start, region.stop)):
            axes[axis].update(ends)
    return found


def _holders(layout: Layout) -> dict[TensorRegion, set[int]]:
    """Return regions without overlaps, each with the ranks that hold it."""
    found: dict[TensorRegion, set[int]] = defaultdict(set)
    for rank, placements in enumerate(layout):
        for placement in placements:
            if placement.region.elements:
                found[placement.region].add(rank)
    by_tensor: dict[str, list[TensorRegion]] = defaultdict(list)
    for region in found:
        by_tensor[region.tensor].append(region)
    for regions in by_tensor.values():
        if _overlap(regions):
            edges = _edges(regions)[regions[0].tensor]
            for region in regions:
                ranks = found.pop(region)
                for cell in _cut(region, edges):
                    found[cell] = found[cell] | ranks
    return dict(found)


def _cut(region: TensorRegion, edges: Sequence[set[int]]) -> Iterator[TensorRegion]:
    axes = []
    for axis, (start, stop) in enumerate(zip(region.start, region.stop)):
        inner = sorted(edge for edge in edges[axis] if start < edge < stop) if axis < len(edges) else []
        axes.append(list(itertools.pairwise([start, *inner, stop])))
    for cell in itertools.product(*axes):
        yield TensorRegion(region.tensor, tuple(a for a, _ in cell), tuple(b for _, b in cell))


def _rows(region: TensorRegion, elements_max: int) -> Iterator[TensorRegion]:
    """Yield a region in runs of rows of about equal size, none above the limit if a single row is not."""
    if not region.start or region.elements <= elements_max:
        yield region
        return
    rows = region.shape[0]
    row_elements = region.elements // rows
    parts = min(rows, math.ceil(rows / max(1, elements_max // row_elements)))
    for part in range(parts):
        first, last = bounds(rows, parts, part)
        start, stop = (region.start[0] + first, *region.start[1:]), (region.start[0] + last, *region.stop[1:])
        yield TensorRegion(region.tensor, start, stop)


def _owners(
    chunks: Sequence[TensorRegion], holders: Mapping[TensorRegion, set[int]], item_bytes: Mapping[str, int]
) -> tuple[int, ...]:
    """Choose one holder per chunk: of several, the one with the fewest bytes so far; large chunks are dealt first."""
    sizes = {chunk: chunk.elements * item_bytes[chunk.tensor] for chunk in chunks}
    load: dict[int, int] = defaultdict(int)
    owner: dict[TensorRegion, int] = {}
    for chunk in sorted(chunks, key=lambda chunk: (len(holders[chunk]) > 1, -sizes[chunk], chunk)):
        owner[chunk] = min(holders[chunk], key=lambda rank: (load[rank], rank))
        load[owner[chunk]] += sizes[chunk]
    return tuple(owner[chunk] for chunk in chunks)


def bounds(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return the range of part number `part` of `parts` that differ by at most one; the first ones are the longer."""
    small, larger = divmod(count, parts)
    first = part * small + min(part, larger)
    return first, first + small + (part < larger)
