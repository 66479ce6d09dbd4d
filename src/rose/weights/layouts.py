"""The layouts of trainers and workers, built step by step from whole tensors.

    layout = tensor_parallel(tensors, rules, 4)       heads, columns and rows split over ranks, the rest replicated
    layout = fuse(layout, "qkv_proj", [...])          several local tensors as one
    layout = pipeline(layout, layers, stages=2)       layers in stages; ranks count tensor-parallel first
    layout = row_shards(layout, 8)                    FSDP2, ZeRO-3: every local tensor cut by rows
    layout = flat_shards(layout, 8)                   ZeRO-1/2, FSDP1: cut as one run of numbers
    layout = tie(layout, "lm_head.weight", "model.embed_tokens.weight")

Sizes need not divide. Tensor parallelism deals out whole units (heads, columns) with the first ranks getting one more;
with fewer key-value heads than ranks every head is held by several. Rows are dealt out as `torch.chunk` does, which can
leave the last ranks with none. A vocabulary is padded first, as serving engines do; no rank holds the padding.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rose.models.model_spec import ModelSpec
from rose.models.tensors import expected_tensors
from rose.weights.shards import Layout, LayoutError, Placements, Point, ShardPlacement, Tensor, TensorRegion, bounds

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Rule:
    """The split of a tensor into `units` indivisible parts along `axis`, which may be padded beyond the tensor."""

    axis: int
    units: int
    padded: int = 0  # length of the axis with padding; 0 if there is none


def whole(tensors: Sequence[Tensor]) -> list[ShardPlacement]:
    """Return the placements of a rank that has every tensor whole, under its own name."""
    return [ShardPlacement(t.whole(), t.name, t.shape, (0,) * len(t.shape)) for t in tensors]


def tensors_of(spec: ModelSpec, dtype: str = "BF16") -> list[Tensor]:
    """Return the logical tensors of a model."""
    return [Tensor(name, shape, dtype) for name, shape in expected_tensors(spec).items()]


def rules_of(spec: ModelSpec, *, vocabulary_multiple: int = 1) -> dict[str, Rule]:
    """Return the split of a transformer: projections into heads and columns by rows, projections back by columns."""
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
    """Return every rank's share; tensors without a rule are replicated."""
    return [
        [placement for tensor in tensors for placement in _share(tensor, rules.get(tensor.name), degree, rank)]
        for rank in range(degree)
    ]


def _share(tensor: Tensor, rule: Rule | None, degree: int, rank: int) -> list[ShardPlacement]:
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
    region = TensorRegion(tensor.name, _with(origin, rule.axis, start), _with(tensor.shape, rule.axis, stop))
    return [ShardPlacement(region, tensor.name, local_shape, origin)]


def fuse(layout: Layout, parts: Sequence[str], fused: str, *, groups: int = 1) -> Layout:
    """Stack local tensors by rows into one, on every rank that has them: q, k and v; gate and up.

    With more than one group each part is cut into that many equal runs, and the runs alternate: q0 k0 v0 q1 k1 v1 ...
    """
    return [_fused(placements, parts, fused, groups) for placements in layout]


def _fused(placements: Placements, parts: Sequence[str], fused: str, groups: int) -> list[ShardPlacement]:
    rows = {placement.local: placement.local_shape[0] for placement in placements if placement.local in parts}
    if not rows:
        return list(placements)
    if len(rows) < len(parts) or any(count % groups for count in rows.values()):
        raise LayoutError(f"`{fused}` cannot be made of {', '.join(parts)} in {groups} groups")
    group_rows = sum(rows.values()) // groups
    shape = next(placement.local_shape for placement in placements if placement.local in parts)
    local_shape = (sum(rows.values()), *shape[1:])
    found: list[ShardPlacement] = []
    for placement in placements:
        if placement.local not in parts:
            found.append(placement)
            continue
        run = rows[placement.local] // groups
        before = sum(rows[part] // groups for part in parts[: list(parts).index(placement.local)])
        for group in range(groups):
            chunk = _local_rows(placement, group * run, (group + 1) * run)
            if chunk is not None:
                row = group * group_rows + before + chunk.offset[0]
                found.append(replace(chunk, local=fused, local_shape=local_shape, offset=(row, *chunk.offset[1:])))
    return found


def fuse_each_layer(layout: Layout, parts: Sequence[str], fused: str, *, groups: int = 1) -> Layout:
    """Call `fuse` for the weights and biases of every layer; names are given as in "self_attn.q_proj"."""
    locals_ = {placement.local for placements in layout for placement in placements}
    first = re.compile(rf"(.*\.layers\.\d+\.){re.escape(parts[0])}(\.\w+)")
    for local in sorted(locals_):
        match = first.fullmatch(local)
        if match:
            names = [f"{match[1]}{part}{match[2]}" for part in parts]
            layout = fuse(layout, names, f"{match[1]}{fused}{match[2]}", groups=groups)
    return layout


def pipeline(layout: Layout, layers: int, stages: int, *, tied: str | None = None) -> Layout:
    """Split each rank of the layout into `stages` ranks: rank = stage * len(layout) + old rank.

    What comes before the layers is on the first stage, what comes after them on the last; a tied tensor is on both.
    """
    return [
        [placement for placement in placements if stage in _stages(placement, layers, stages, tied)]
        for stage in range(stages)
        for placements in layout
    ]


def _stages(placement: ShardPlacement, layers: int, stages: int, tied: str | None) -> set[int]:
    name = placement.region.tensor
    match = _LAYER.search(name)
    if match:
        layer = int(match[1])
        ends = [bounds(layers, stages, stage) for stage in range(stages)]
        return {stage for stage, (first, last) in enumerate(ends) if first <= layer < last}
    if name == tied:
        return {0, stages - 1}
    return {0} if "embed" in name else {stages - 1}


def row_shards(layout: Layout, ranks: int) -> Layout:
    """Split every rank of the layout into `ranks` ranks that share its tensors by rows: rank = old * ranks + new."""
    shards: list[Placements] = []
    for placements, rank in itertools.product(layout, range(ranks)):
        shard = []
        for placement in placements:
            rows = placement.local_shape[0] if placement.local_shape else 1
            run = math.ceil(rows / ranks)
            first, last = min(rank * run, rows), min((rank + 1) * run, rows)
            part = _local_rows(placement, first, last)
            if part is not None:
                shape = (last - first, *placement.local_shape[1:]) if placement.local_shape else ()
                shard.append(replace(part, local_shape=shape))
        shards.append(shard)
    return shards


def flat_shards(layout: Layout, ranks: int) -> Layout:
    """Split every rank of the layout into `ranks` ranks that share each local tensor as one run of numbers."""
    shards: list[Placements] = []
    for placements, rank in itertools.product(layout, range(ranks)):
        shard = []
        for placement in placements:
            if placement.local_shape != placement.region.shape:
                what = f"`{placement.local}` is fused or padded; a flat shard of it would not be made of regions"
                raise LayoutError(what)
            elements = placement.region.elements
            run = math.ceil(elements / ranks)
            first, last = min(rank * run, elements), min((rank + 1) * run, elements)
            offset = 0
            for region in _regions_of_run(placement.region, first, last):
                shard.append(ShardPlacement(region, placement.local, (last - first,), (offset,), is_flat=True))
                offset += region.elements
        shards.append(shard)
    return shards


def _regions_of_run(region: TensorRegion, first: int, last: int) -> Iterator[TensorRegion]:
    """Yield the regions that numbers `first` up to `last` of a region fill when it is read row by row."""
    if first == last:
        return
    if not region.shape:
        yield region
        return
    if len(region.shape) == 1:
        yield TensorRegion(region.tensor, (region.start[0] + first,), (region.start[0] + last,))
        return
    row = math.prod(region.shape[1:])
    while first < last:
        at = first // row
        whole_rows = (last - first) // row if first % row == 0 else 0
        if whole_rows:
            start, stop = region.start[0] + at, region.start[0] + at + whole_rows
            yield TensorRegion(region.tensor, (start, *region.start[1:]), (stop, *region.stop[1:]))
            first += whole_rows * row
            continue
        end = min(last, (at + 1) * row)
        inner = TensorRegion(region.tensor, region.start[1:], region.stop[1:])
        for part in _regions_of_run(inner, first - at * row, end - at * row):
            yield TensorRegion(
                region.tensor, (region.start[0] + at, *part.start), (region.start[0] + at + 1, *part.stop)
            )
        first = end


def tie(layout: Layout, local: str, tensor: str) -> Layout:
    """Add a second local name on ranks that hold the tensor, as in engines that do not share the memory."""
    return [[*h, *(replace(placement, local=local) for placement in h if placement.local == tensor)] for h in layout]


def local_shapes(placements: Placements) -> dict[str, Point]:
    """Return the shape of each tensor that a rank keeps."""
    shapes: dict[str, Point] = {}
    for placement in placements:
        shape = shapes.setdefault(placement.local, placement.local_shape)
        assert shape == placement.local_shape, "a local tensor with two shapes"
    return shapes


def _local_rows(placement: ShardPlacement, first: int, last: int) -> ShardPlacement | None:
    """Return the part of a placement in rows `first` up to `last` of its local tensor, as if that were the tensor."""
    assert not placement.is_flat
    if not placement.offset:
        return placement if first < last else None
    begin = max(first, placement.offset[0])
    end = min(last, placement.offset[0] + placement.region.shape[0])
    if begin >= end:
        return None
    top = placement.region.start[0] - placement.offset[0]
    region = TensorRegion(
        placement.region.tensor, (top + begin, *placement.region.start[1:]), (top + end, *placement.region.stop[1:])
    )
    return replace(placement, region=region, offset=(begin - first, *placement.offset[1:]))


def _with(point: Point, axis: int, value: int) -> Point:
    return (*point[:axis], value, *point[axis + 1 :])
