"""Who holds which part of which tensor, and how the parts are cut so that everybody finds whole pieces.

A *tensor* here is a logical one, as a Hugging Face folder names it. A *box* is a rectangular part of it. A *holding*
says that a rank keeps a box inside one of its local tensors, at an offset: with that, fused, split, padded, tied and
flattened tensors are all the same thing. A *layout* is the holdings of every rank (`weights.layouts` makes them).

`plan` cuts what the trainer's ranks hold along every edge that any worker's holding has. The result is *pieces*: each
lies wholly inside one trainer rank's shard, and wholly inside or wholly outside every worker's. So a rank encodes its
own pieces without asking anybody, and a worker fetches exactly its own, each a contiguous run of bytes. What several
ranks hold is pushed by one of them, chosen so that the bytes are spread evenly. Everything is computed from the layouts
alone, and equally on every rank.
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

PIECE_ELEMENTS_MAX = 64 << 20  # 128 MiB of bf16: small enough to encode, push, pull and decode side by side
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}

Point = tuple[int, ...]
Array = NDArray[Any]


class LayoutError(ConfigError):
    """Layouts that do not fit the tensors or each other."""


@dataclass(frozen=True, slots=True, order=True)
class Tensor:
    """A logical tensor; `dtype` is BF16, F16 or F32."""

    name: str
    shape: Point
    dtype: str = "BF16"

    def whole(self) -> Box:
        return Box(self.name, (0,) * len(self.shape), self.shape)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular part of a tensor, from `start` up to `stop`."""

    tensor: str
    start: Point
    stop: Point

    @property
    def shape(self) -> Point:
        return tuple(stop - start for start, stop in zip(self.start, self.stop))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def is_within(self, other: Box) -> bool:
        return (
            self.tensor == other.tensor
            and all(mine >= theirs for mine, theirs in zip(self.start, other.start))
            and all(mine <= theirs for mine, theirs in zip(self.stop, other.stop))
        )

    def meet(self, other: Box) -> Box | None:
        """The part that both have, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        is_common = self.tensor == other.tensor and all(first < last for first, last in zip(start, stop))
        return Box(self.tensor, start, stop) if is_common else None

    def slices(self, inside: Box) -> tuple[slice, ...]:
        """Where this box lies in an array of the other, which holds all of it."""
        assert self.is_within(inside), f"{self} is not within {inside}"
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, inside.start))


@dataclass(frozen=True, slots=True)
class Holding:
    """A rank keeps `box` in its tensor `local`, from `offset` on; as one run of numbers if that tensor is flat."""

    box: Box
    local: str
    local_shape: Point
    offset: Point
    is_flat: bool = False

    def view(self, array: Array, piece: Box | None = None) -> Array:
        """The part of the rank's own array that is the box, or a piece of it; writing to it writes to the array."""
        if array.shape != self.local_shape:
            raise LayoutError(f"`{self.local}` has shape {array.shape} here; its layout says {self.local_shape}")
        if self.is_flat:
            mine = array[self.offset[0] : self.offset[0] + self.box.elements].reshape(self.box.shape)
        else:
            mine = _part(array, tuple(slice(o, o + n) for o, n in zip(self.offset, self.box.shape)))
        return mine if piece is None else _part(mine, piece.slices(self.box))


def _part(array: Array, slices: tuple[slice, ...]) -> Array:
    """Never a copy: without the dots, a single number would be one."""
    where: tuple[Any, ...] = (*slices, ...)
    found: Array = array[where]
    return found


Holdings = Sequence[Holding]
Layout = Sequence[Holdings]  # by rank


@dataclass(frozen=True, slots=True)
class Plan:
    """The pieces, in order of tensor and place, and which trainer rank pushes each."""

    pieces: tuple[Box, ...]
    owners: tuple[int, ...]

    def pieces_of(self, rank: int) -> list[Box]:
        return [piece for piece, owner in zip(self.pieces, self.owners) if owner == rank]


def plan(
    tensors: Sequence[Tensor],
    trainer: Layout,
    workers: Iterable[Layout] = (),
    *,
    piece_elements_max: int = PIECE_ELEMENTS_MAX,
) -> Plan:
    """Cut what the trainer holds so that every rank of every worker layout needs whole pieces only."""
    edges = _edges(holding.box for layout in workers for holdings in layout for holding in holdings)
    holders = _holders(trainer)
    pieces: dict[Box, set[int]] = {}
    for box, ranks in holders.items():
        for cell in _cut(box, edges[box.tensor]):
            for piece in _rows(cell, piece_elements_max):
                pieces[piece] = ranks
    ordered = sorted(pieces)
    check_cover(tensors, ordered)
    item_bytes = {tensor.name: ITEM_BYTES[tensor.dtype] for tensor in tensors}
    return Plan(tuple(ordered), _owners(ordered, pieces, item_bytes))


def places(pieces: Iterable[Box], holdings: Holdings) -> list[tuple[Box, Holding]]:
    """The pieces that a rank needs, each with where it goes; a piece held twice (tied) comes twice.

    Raises LayoutError if a piece straddles the rank's edge or the pieces do not fill what it holds.
    """
    by_tensor: dict[str, list[Box]] = defaultdict(list)
    for piece in pieces:
        by_tensor[piece.tensor].append(piece)
    found: list[tuple[Box, Holding]] = []
    for holding in holdings:
        missing = holding.box.elements
        for piece in by_tensor[holding.box.tensor]:
            if piece.meet(holding.box) is None:
                continue
            if not piece.is_within(holding.box):
                raise LayoutError(
                    f"the published pieces of `{piece.tensor}` are not cut where `{holding.local}` begins or ends",
                    hint="name this worker's tensor-parallel degree in the trainer's settings",
                )
            found.append((piece, holding))
            missing -= piece.elements
        if missing:
            raise LayoutError(
                f"{missing} numbers of `{holding.box.tensor}` that `{holding.local}` needs are not published"
            )
    return found


def check_cover(tensors: Sequence[Tensor], boxes: Sequence[Box]) -> None:
    """Every number of every tensor lies in exactly one box."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    if len(shapes) < len(tensors):
        raise LayoutError("two tensors have the same name")
    by_tensor: dict[str, list[Box]] = {name: [] for name in shapes}
    for box in boxes:
        _check_inside(box, shapes.get(box.tensor))
        by_tensor[box.tensor].append(box)
    for name, shape in shapes.items():
        covered = sum(box.elements for box in by_tensor[name])
        if _overlap(by_tensor[name]):
            raise LayoutError(f"two pieces of `{name}` overlap")
        if covered != math.prod(shape):
            raise LayoutError(f"the pieces of `{name}` cover {covered} of its {math.prod(shape)} numbers")


def _check_inside(box: Box, shape: Point | None) -> None:
    if shape is None:
        raise LayoutError(f"a piece of `{box.tensor}`, which is not among the tensors")
    is_box = len(box.start) == len(box.stop) == len(shape)
    if not is_box or any(not 0 <= a < b <= n for a, b, n in zip(box.start, box.stop, shape)):
        raise LayoutError(f"{list(box.start)} to {list(box.stop)} is no part of `{box.tensor}`, which is {list(shape)}")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two have a number in common. Only those whose rows meet are compared."""
    if len(boxes) < 2 or not boxes[0].start:
        return len(boxes) > 1
    ordered = sorted(boxes, key=lambda box: box.start)
    starts = np.array([box.start for box in ordered])
    stops = np.array([box.stop for box in ordered])
    for index in range(len(ordered) - 1):
        last = np.searchsorted(starts[:, 0], stops[index, 0], side="left")
        later = slice(index + 1, last)
        if np.any(np.all((starts[later] < stops[index]) & (stops[later] > starts[index]), axis=1)):
            return True
    return False


def _edges(boxes: Iterable[Box]) -> Mapping[str, list[set[int]]]:
    """Of each tensor, where along each axis some box begins or ends."""
    found: dict[str, list[set[int]]] = defaultdict(list)
    for box in boxes:
        axes = found[box.tensor]
        axes.extend(set() for _ in range(len(box.start) - len(axes)))
        for axis, ends in enumerate(zip(box.start, box.stop)):
            axes[axis].update(ends)
    return found


def _holders(layout: Layout) -> dict[Box, set[int]]:
    """Boxes without overlaps, each with the ranks that hold it."""
    found: dict[Box, set[int]] = defaultdict(set)
    for rank, holdings in enumerate(layout):
        for holding in holdings:
            if holding.box.elements:
                found[holding.box].add(rank)
    by_tensor: dict[str, list[Box]] = defaultdict(list)
    for box in found:
        by_tensor[box.tensor].append(box)
    for boxes in by_tensor.values():
        if _overlap(boxes):
            edges = _edges(boxes)[boxes[0].tensor]
            for box in boxes:
                ranks = found.pop(box)
                for cell in _cut(box, edges):
                    found[cell] = found[cell] | ranks
    return dict(found)


def _cut(box: Box, edges: Sequence[set[int]]) -> Iterator[Box]:
    """The box, cut along every edge that crosses it."""
    axes = []
    for axis, (start, stop) in enumerate(zip(box.start, box.stop)):
        inner = sorted(edge for edge in edges[axis] if start < edge < stop) if axis < len(edges) else []
        axes.append(list(itertools.pairwise([start, *inner, stop])))
    for cell in itertools.product(*axes):
        yield Box(box.tensor, tuple(a for a, _ in cell), tuple(b for _, b in cell))


def _rows(box: Box, elements_max: int) -> Iterator[Box]:
    """The box in runs of rows of about equal size, none larger than the limit if a single row is not."""
    if not box.start or box.elements <= elements_max:
        yield box
        return
    rows = box.shape[0]
    row_elements = box.elements // rows
    parts = min(rows, math.ceil(rows / max(1, elements_max // row_elements)))
    for part in range(parts):
        first, last = bounds(rows, parts, part)
        start, stop = (box.start[0] + first, *box.start[1:]), (box.start[0] + last, *box.stop[1:])
        yield Box(box.tensor, start, stop)


def _owners(pieces: Sequence[Box], holders: Mapping[Box, set[int]], item_bytes: Mapping[str, int]) -> tuple[int, ...]:
    """One holder of each piece: the only one, or of several the one with the least to push so far, the large first."""
    sizes = {piece: piece.elements * item_bytes[piece.tensor] for piece in pieces}
    load: dict[int, int] = defaultdict(int)
    owner: dict[Box, int] = {}
    for piece in sorted(pieces, key=lambda piece: (len(holders[piece]) > 1, -sizes[piece], piece)):
        owner[piece] = min(holders[piece], key=lambda rank: (load[rank], rank))
        load[owner[piece]] += sizes[piece]
    return tuple(owner[piece] for piece in pieces)


def bounds(count: int, parts: int, part: int) -> tuple[int, int]:
    """From where to where part number `part` goes, of `parts` that differ by at most one; the first are the longer."""
    small, larger = divmod(count, parts)
    first = part * small + min(part, larger)
    return first, first + small + (part < larger)
