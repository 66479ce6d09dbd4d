"""The layouts that trainers and workers really have, built step by step from whole tensors.

    holdings = whole(tensors)                         one rank with everything
    layout = tensor_parallel(tensors, rules, 4)       heads, columns and rows split over ranks, the rest replicated
    layout = fuse(layout, "qkv_proj", [...])          several local tensors as one
    layout = pipeline(layout, tensors, stages=2)      layers in stages; ranks count tensor-parallel first
    layout = row_shards(layout, 8)                    FSDP2, ZeRO-3: every local tensor cut by rows
    layout = flat_shards(layout, 8)                   ZeRO-1/2, FSDP1: cut as one run of numbers
    layout = tie(layout, "lm_head.weight", "model.embed_tokens.weight")

Sizes need not divide. Tensor parallelism deals out whole units (heads, columns) with the first ranks getting one more;
with fewer key-value heads than ranks every head is held by several. Rows are dealt out as `torch.chunk` does, which can
leave the last ranks with none. A vocabulary is padded first, as serving engines do, and the padding is nobody's.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rose.models.spec import ModelSpec
from rose.models.tensors import expected_tensors
from rose.weights.shards import Box, Holding, Holdings, Layout, LayoutError, Point, Tensor, bounds

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Rule:
    """How one tensor is split: `units` indivisible parts along `axis`; rows beyond the tensor's own are padding."""

    axis: int
    units: int
    padded: int = 0  # length of the axis with padding; 0 if there is none


def whole(tensors: Sequence[Tensor]) -> list[Holding]:
    """Everything, under its own name."""
    return [Holding(t.whole(), t.name, t.shape, (0,) * len(t.shape)) for t in tensors]


def replicated(tensors: Sequence[Tensor], ranks: int) -> Layout:
    return [whole(tensors) for _ in range(ranks)]


def tensors_of(spec: ModelSpec, dtype: str = "BF16") -> list[Tensor]:
    """The logical tensors of a model."""
    return [Tensor(name, shape, dtype) for name, shape in expected_tensors(spec).items()]


def rules_of(spec: ModelSpec, *, vocabulary_multiple: int = 1) -> dict[str, Rule]:
    """How a transformer is split: projections into heads and columns by rows, projections back by columns."""
    vocabulary = math.ceil(spec.vocabulary / vocabulary_multiple) * vocabulary_multiple
    by_part = {
        "q_proj": Rule(0, spec.heads),
        "k_proj": Rule(0, spec.kv_heads),
        "v_proj": Rule(0, spec.kv_heads),
        "o_proj": Rule(1, spec.heads),
        "gate_proj": Rule(0, spec.ffn),
        "up_proj": Rule(0, spec.ffn),
        "down_proj": Rule(1, spec.ffn),
        "embed_tokens": Rule(0, vocabulary, vocabulary),
        "lm_head": Rule(0, vocabulary, vocabulary),
    }
    found = {}
    for name, shape in expected_tensors(spec).items():
        rule = by_part.get(name.split(".")[-2])
        if rule is not None and rule.axis < len(shape):  # the bias of a projection back is replicated
            found[name] = rule
    return found


def tensor_parallel(tensors: Sequence[Tensor], rules: Mapping[str, Rule], degree: int) -> Layout:
    """Every rank's share; tensors without a rule are replicated."""
    return [
        [held for tensor in tensors for held in _share(tensor, rules.get(tensor.name), degree, rank)]
        for rank in range(degree)
    ]


def _share(tensor: Tensor, rule: Rule | None, degree: int, rank: int) -> list[Holding]:
    if rule is None or (degree == 1 and not rule.padded):
        return whole([tensor])
    length = rule.padded or tensor.shape[rule.axis]
    if length % rule.units or length < tensor.shape[rule.axis]:
        raise LayoutError(f"`{tensor.name}` of length {length} cannot be split into {rule.units} units")
    if rule.units < degree:
        first = rank * rule.units // degree
        last = first + 1
    else:
        first, last = bounds(rule.units, degree, rank)
    unit = length // rule.units
    local_shape = _with(tensor.shape, rule.axis, (last - first) * unit)
    start = min(first * unit, tensor.shape[rule.axis])
    stop = min(last * unit, tensor.shape[rule.axis])
    if start == stop:
        return []  # padding only
    origin = (0,) * len(tensor.shape)
    box = Box(tensor.name, _with(origin, rule.axis, start), _with(tensor.shape, rule.axis, stop))
    return [Holding(box, tensor.name, local_shape, origin)]


def fuse(layout: Layout, parts: Sequence[str], fused: str, *, groups: int = 1) -> Layout:
    """Stack local tensors by rows into one, on every rank that has them: q, k and v; gate and up.

    With more than one group each part is cut into that many equal runs, and the runs alternate: q0 k0 v0 q1 k1 v1 ...
    """
    return [_fused(holdings, parts, fused, groups) for holdings in layout]


def _fused(holdings: Holdings, parts: Sequence[str], fused: str, groups: int) -> list[Holding]:
    rows = {held.local: held.local_shape[0] for held in holdings if held.local in parts}
    if not rows:
        return list(holdings)
    if len(rows) < len(parts) or any(count % groups for count in rows.values()):
        raise LayoutError(f"`{fused}` cannot be made of {', '.join(parts)} in {groups} groups")
    group_rows = sum(rows.values()) // groups
    shape = next(held.local_shape for held in holdings if held.local in parts)
    local_shape = (sum(rows.values()), *shape[1:])
    found: list[Holding] = []
    for held in holdings:
        if held.local not in parts:
            found.append(held)
            continue
        run = rows[held.local] // groups
        before = sum(rows[part] // groups for part in parts[: list(parts).index(held.local)])
        for group in range(groups):
            piece = _local_rows(held, group * run, (group + 1) * run)
            if piece is not None:
                row = group * group_rows + before + piece.offset[0]
                found.append(replace(piece, local=fused, local_shape=local_shape, offset=(row, *piece.offset[1:])))
    return found


def fuse_each_layer(layout: Layout, parts: Sequence[str], fused: str, *, groups: int = 1) -> Layout:
    """`fuse` for every layer, weights and biases: parts and result as in "self_attn.q_proj"."""
    locals_ = {held.local for holdings in layout for held in holdings}
    first = re.compile(rf"(.*\.layers\.\d+\.){re.escape(parts[0])}(\.\w+)")
    for local in sorted(locals_):
        match = first.fullmatch(local)
        if match:
            names = [f"{match[1]}{part}{match[2]}" for part in parts]
            layout = fuse(layout, names, f"{match[1]}{fused}{match[2]}", groups=groups)
    return layout


def pipeline(layout: Layout, layers: int, stages: int, *, tied: str | None = None) -> Layout:
    """Each rank of the layout becomes `stages` ranks, stage by stage: rank = stage * len(layout) + old rank.

    What comes before the layers is on the first stage, what comes after them on the last; a tied tensor is on both.
    """
    return [
        [held for held in holdings if stage in _stages(held, layers, stages, tied)]
        for stage in range(stages)
        for holdings in layout
    ]


def _stages(held: Holding, layers: int, stages: int, tied: str | None) -> set[int]:
    name = held.box.tensor
    match = _LAYER.search(name)
    if match:
        layer = int(match[1])
        return {
            stage
            for stage in range(stages)
            if bounds(layers, stages, stage)[0] <= layer < bounds(layers, stages, stage)[1]
        }
    if name == tied:
        return {0, stages - 1}
    return {0} if "embed" in name else {stages - 1}


def row_shards(layout: Layout, ranks: int) -> Layout:
    """Every rank of the layout becomes `ranks` ranks that share its local tensors by rows: rank = old * ranks + new."""
    return [_row_shard(holdings, ranks, rank) for holdings in layout for rank in range(ranks)]


def _row_shard(holdings: Holdings, ranks: int, rank: int) -> list[Holding]:
    found = []
    for held in holdings:
        rows = held.local_shape[0] if held.local_shape else 1
        run = math.ceil(rows / ranks)
        first, last = min(rank * run, rows), min((rank + 1) * run, rows)
        piece = _local_rows(held, first, last)
        if piece is not None:
            shape = (last - first, *held.local_shape[1:]) if held.local_shape else ()
            found.append(replace(piece, local_shape=shape))
    return found


def flat_shards(layout: Layout, ranks: int) -> Layout:
    """Every rank of the layout becomes `ranks` ranks that share each local tensor as one run of numbers."""
    return [_flat_shard(holdings, ranks, rank) for holdings in layout for rank in range(ranks)]


def _flat_shard(holdings: Holdings, ranks: int, rank: int) -> list[Holding]:
    found = []
    for held in holdings:
        if held.local_shape != held.box.shape:
            raise LayoutError(f"`{held.local}` is fused or padded; a flat shard of it would not be made of boxes")
        elements = held.box.elements
        run = math.ceil(elements / ranks)
        first, last = min(rank * run, elements), min((rank + 1) * run, elements)
        offset = 0
        for box in _boxes_of_run(held.box, first, last):
            found.append(Holding(box, held.local, (last - first,), (offset,), is_flat=True))
            offset += box.elements
    return found


def _boxes_of_run(box: Box, first: int, last: int) -> Iterator[Box]:
    """The boxes, in order, that numbers `first` up to `last` of a box fill when it is read row by row."""
    if first == last:
        return
    if not box.shape:
        yield box
        return
    if len(box.shape) == 1:
        yield Box(box.tensor, (box.start[0] + first,), (box.start[0] + last,))
        return
    row = math.prod(box.shape[1:])
    while first < last:
        at = first // row
        whole_rows = (last - first) // row if first % row == 0 else 0
        if whole_rows:
            start, stop = box.start[0] + at, box.start[0] + at + whole_rows
            yield Box(box.tensor, (start, *box.start[1:]), (stop, *box.stop[1:]))
            first += whole_rows * row
            continue
        end = min(last, (at + 1) * row)
        inner = Box(box.tensor, box.start[1:], box.stop[1:])
        for part in _boxes_of_run(inner, first - at * row, end - at * row):
            yield Box(box.tensor, (box.start[0] + at, *part.start), (box.start[0] + at + 1, *part.stop))
        first = end


def tie(layout: Layout, local: str, tensor: str) -> Layout:
    """Ranks that hold the tensor also keep it under a second local name, as engines do that do not share the memory."""
    return [[*h, *(replace(held, local=local) for held in h if held.local == tensor)] for h in layout]


def rename(layout: Layout, name: Callable[[str], str]) -> Layout:
    """The same with other local names."""
    return [[replace(held, local=name(held.local)) for held in holdings] for holdings in layout]


def local_shapes(holdings: Holdings) -> dict[str, Point]:
    """The tensors that a rank keeps; each has one shape."""
    found: dict[str, set[Point]] = defaultdict(set)
    for held in holdings:
        found[held.local].add(held.local_shape)
    assert all(len(shapes) == 1 for shapes in found.values()), "a local tensor with two shapes"
    return {name: next(iter(shapes)) for name, shapes in found.items()}


def _local_rows(held: Holding, first: int, last: int) -> Holding | None:
    """The part of a holding in rows `first` up to `last` of its local tensor, as if that were the tensor."""
    assert not held.is_flat
    if not held.offset:
        return held if first < last else None
    begin = max(first, held.offset[0])
    end = min(last, held.offset[0] + held.box.shape[0])
    if begin >= end:
        return None
    top = held.box.start[0] - held.offset[0]
    box = Box(held.box.tensor, (top + begin, *held.box.start[1:]), (top + end, *held.box.stop[1:]))
    return replace(held, box=box, offset=(begin - first, *held.offset[1:]))


def _with(point: Point, axis: int, value: int) -> Point:
    return (*point[:axis], value, *point[axis + 1 :])
