"""Layouts of any kind, cut into pieces: all is there once, everybody finds whole pieces, and the bytes are right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.chain_ends import Member, Trainer, equal, random_weights, shard, stepped

from rose.core.versions import VersionId
from rose.models.presets import PRESETS, preset_spec
from rose.weights.layouts import (
    Rule,
    flat_shards,
    fuse,
    fuse_each_layer,
    local_shapes,
    pipeline,
    replicated,
    row_shards,
    rules_of,
    tensor_parallel,
    tensors_of,
    tie,
    whole,
)
from rose.weights.relay.memory import MemoryRelay
from rose.weights.shards import Box, LayoutError, Tensor, bounds, check_cover, places, plan

LAYERS = 3


@st.composite
def transformers(draw):
    """A small transformer with sizes that need not divide, and the rules by which it is split."""
    head, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    hidden, ffn, vocabulary = draw(st.integers(1, 7)), draw(st.integers(1, 9)), draw(st.integers(1, 13))
    padded = vocabulary + draw(st.integers(0, 5))
    heads = kv_heads * group
    tensors = [Tensor("model.embed_tokens.weight", (vocabulary, hidden))]
    rules = {"model.embed_tokens.weight": Rule(0, padded, padded)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": ((heads * head, hidden), Rule(0, heads)),
            "self_attn.k_proj": ((kv_heads * head, hidden), Rule(0, kv_heads)),
            "self_attn.v_proj": ((kv_heads * head, hidden), Rule(0, kv_heads)),
            "self_attn.o_proj": ((hidden, heads * head), Rule(1, heads)),
            "mlp.gate_proj": ((ffn, hidden), Rule(0, ffn)),
            "mlp.up_proj": ((ffn, hidden), Rule(0, ffn)),
            "mlp.down_proj": ((hidden, ffn), Rule(1, ffn)),
        }
        for name, (shape, rule) in shapes.items():
            tensors.append(Tensor(f"{at}.{name}.weight", shape))
            rules[f"{at}.{name}.weight"] = rule
        tensors.append(Tensor(f"{at}.norm.weight", (hidden,), "F32"))
    tensors.append(Tensor("model.norm.weight", (hidden,), "F32"))
    return tensors, rules


def trainer_layouts(draw, tensors, rules):
    """Tensor parallel, pipeline, rows or flat runs, or several of them together."""
    layout = tensor_parallel(tensors, rules, draw(st.integers(1, 4)))
    if draw(st.booleans()):
        layout = pipeline(layout, LAYERS, draw(st.integers(1, 3)), tied="model.embed_tokens.weight")
    kind = draw(st.sampled_from(["as it is", "rows", "flat", "replicated"]))
    if kind == "rows":
        layout = row_shards(layout, draw(st.integers(1, 4)))
    elif kind == "flat":
        layout = flat_shards([whole(tensors)], draw(st.integers(1, 5)))
    elif kind == "replicated":
        layout = [*layout, *layout]
    return layout


def worker_layout(draw, tensors, rules):
    layout = tensor_parallel(tensors, rules, draw(st.integers(1, 5)))
    if draw(st.booleans()):
        layout = fuse_each_layer(layout, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.qkv")
        layout = fuse_each_layer(layout, ["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up")
    if draw(st.booleans()):
        layout = tie(layout, "lm_head.weight", "model.embed_tokens.weight")
    return layout


@given(st.data())
@settings(max_examples=max(1, settings().max_examples // 5))
def test_every_worker_gets_its_bytes_from_every_trainer(data):
    """All ranks publish an anchor and a delta; every worker rank, laid out differently, ends with its part."""
    tensors, rules = data.draw(transformers())
    layout = trainer_layouts(data.draw, tensors, rules)
    workers = [worker_layout(data.draw, tensors, rules) for _ in range(data.draw(st.integers(1, 2)))]
    relay = MemoryRelay()
    limit = data.draw(st.sampled_from([5, 1000]))
    ranks = start_ranks(relay, tensors, layout, workers, limit)
    weights = random_weights(1, tensors)
    members = [Member(relay, tensors=tensors, holdings=h, weights=None) for worker in workers for h in worker]
    for member in members:
        for array in member.arrays.values():
            array[...] = 0  # padding must stay as it was
    for version in (1, 2):
        publish_all(ranks, version, weights, layout)
        for member in members:
            assert member.sync() == VersionId(1, version)
            assert equal(member.arrays, shard(weights, member.holdings))
        weights = stepped(weights, version)


def start_ranks(relay, tensors, layout, workers, limit):
    options = {"tensors": tensors, "layout": layout, "workers": workers, "piece_elements_max": limit}
    first = Trainer(relay, **options)
    return [first, *(Trainer(relay, rank=rank, epoch=1, **options) for rank in range(1, len(layout)))]


def publish_all(ranks, version, weights, layout):
    """Every rank pushes its own pieces, the first one commits; only the relay joins them."""
    base = ranks[0].writer.newest
    drafts = []
    for rank in ranks:
        rank.writer.newest, rank.is_broken = base, False
        drafts.append(rank.push(version, shard(weights, layout[rank.rank]), anchor=base is None))
    for draft in drafts[1:]:
        draft.leave_part()
    drafts[0].collect_parts(range(len(ranks)))
    drafts[0].commit()


@given(st.data())
def test_a_plan_covers_everything_once_and_cuts_where_workers_need_it(data):
    tensors, rules = data.draw(transformers())
    layout = trainer_layouts(data.draw, tensors, rules)
    workers = [worker_layout(data.draw, tensors, rules)]
    made = plan(tensors, layout, workers, piece_elements_max=data.draw(st.integers(1, 50)))
    assert_filled_once(tensors, made.pieces)
    for piece, owner in zip(made.pieces, made.owners):
        assert any(piece.is_within(held.box) for held in layout[owner])
    for holdings in workers[0]:
        placed = places(made.pieces, holdings)
        assert sum(piece.elements for piece, _ in placed) == sum(held.box.elements for held in holdings)
    assert plan(tensors, layout, workers, piece_elements_max=10**6) == plan(
        tensors, layout, workers, piece_elements_max=10**6
    )


def assert_filled_once(tensors, pieces):
    count = {tensor.name: np.zeros(tensor.shape, int) for tensor in tensors}
    for piece in pieces:
        count[piece.tensor][tuple(map(slice, piece.start, piece.stop))] += 1
    assert all(np.all(times == 1) for times in count.values())


@given(
    boxes=st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=0, max_size=6),
)
def test_covering_once_is_recognised(boxes):
    tensor = Tensor("a", (4, 4))
    cut = [Box("a", (min(a, b), min(c, d)), (max(a, b), max(c, d))) for a, b, c, d in boxes if a != b and c != d]
    count = np.zeros((4, 4), int)
    for box in cut:
        count[tuple(map(slice, box.start, box.stop))] += 1
    try:
        check_cover([tensor], cut)
        is_covered = True
    except LayoutError:
        is_covered = False
    assert is_covered == bool(np.all(count == 1))


@given(count=st.integers(0, 50), parts=st.integers(1, 9))
def test_bounds_share_out_everything(count, parts):
    runs = [bounds(count, parts, part) for part in range(parts)]
    assert [item for first, last in runs for item in range(first, last)] == list(range(count))
    assert max(last - first for first, last in runs) - min(last - first for first, last in runs) <= 1


@given(st.data())
def test_flat_runs_are_boxes_in_reading_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    tensor = Tensor("a", shape)
    ranks = data.draw(st.integers(1, 7))
    values = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    layout = flat_shards([whole([tensor])], ranks)
    joined = [shard({"a": values}, holdings).get("a", np.empty(0, np.uint16)) for holdings in layout]
    assert np.array_equal(np.concatenate(joined), values.reshape(-1))
    assert_filled_once([tensor], [held.box for holdings in layout for held in holdings])


# Stories


def test_what_several_hold_is_shared_out_among_them():
    tensors = [Tensor(f"t{index}", (10, 10)) for index in range(8)]
    made = plan(tensors, replicated(tensors, 4))
    assert sorted(made.owners) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_few_key_value_heads_are_held_by_several_ranks():
    tensors = [Tensor("k", (4, 3))]
    layout = tensor_parallel(tensors, {"k": Rule(0, 2)}, 4)
    assert [holdings[0].box.start[0] for holdings in layout] == [0, 0, 2, 2]
    assert [box.start[0] for box in plan(tensors, layout).pieces] == [0, 2]


def test_padding_belongs_to_nobody():
    tensors = [Tensor("embed", (10, 2))]
    layout = tensor_parallel(tensors, {"embed": Rule(0, 16, 16)}, 4)
    assert [local_shapes(holdings).get("embed") for holdings in layout] == [(4, 2), (4, 2), (4, 2), None]
    assert [held.box.shape for holdings in layout for held in holdings] == [(4, 2), (4, 2), (2, 2)]


def test_groups_alternate_when_fused():
    """As Megatron does: the query heads of a group, its key, its value, then the next group."""
    tensors = [Tensor("q", (4, 1)), Tensor("k", (2, 1)), Tensor("v", (2, 1))]
    (holdings,) = fuse([whole(tensors)], ["q", "k", "v"], "qkv", groups=2)
    values = {"q": [[1], [2], [3], [4]], "k": [[10], [20]], "v": [[100], [200]]}
    local = shard({name: np.array(rows, np.uint16) for name, rows in values.items()}, holdings)
    assert local["qkv"].reshape(-1).tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_pipeline_stages_have_their_layers_and_both_ends_a_tied_embedding():
    names = ["model.embed_tokens.weight", *(f"model.layers.{n}.w" for n in range(3)), "model.norm.weight"]
    layout = pipeline([whole([Tensor(name, (2, 2)) for name in names])], 3, 2, tied=names[0])
    assert [[held.local for held in holdings] for holdings in layout] == [names[:3], [names[0], *names[3:]]]


def test_a_piece_across_a_workers_edge_is_refused():
    tensors = [Tensor("a", (6, 2))]
    made = plan(tensors, [whole(tensors)])
    with pytest.raises(LayoutError, match="not cut where"):
        places(made.pieces, tensor_parallel(tensors, {"a": Rule(0, 6)}, 2)[0])


def test_a_layout_with_a_hole_or_a_stranger_is_refused():
    tensors = [Tensor("a", (6, 2))]
    with pytest.raises(LayoutError, match="cover 6 of its 12"):
        plan(tensors, tensor_parallel(tensors, {"a": Rule(0, 6)}, 2)[:1])
    with pytest.raises(LayoutError, match="not among the tensors"):
        plan(tensors, [whole([*tensors, Tensor("b", (1,))])])


def test_shards_that_overlap_in_part_are_cut_apart():
    tensors = [Tensor("a", (6, 2))]
    layout = [
        tensor_parallel(tensors, {"a": Rule(0, 6)}, 2)[0],
        tensor_parallel(tensors, {"a": Rule(0, 6)}, 3)[1],
        whole(tensors),
    ]
    assert_filled_once(tensors, plan(tensors, layout).pieces)


def test_a_real_model_at_other_degrees():
    """qwen3-3m, trained at TP 2 x PP 2, served at TP 4 with fused projections and a vocabulary padded to 64."""
    spec = preset_spec(PRESETS["qwen3-3m"])
    tensors, rules = tensors_of(spec), rules_of(spec, vocabulary_multiple=64)
    trainer = pipeline(tensor_parallel(tensors, rules_of(spec), 2), spec.layers, 2, tied="model.embed_tokens.weight")
    worker = tensor_parallel(tensors, rules, 4)
    worker = fuse_each_layer(worker, ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "self_attn.qkv_proj")
    worker = fuse_each_layer(worker, ["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up_proj")
    made = plan(tensors, trainer, [worker])
    shapes = local_shapes(worker[0])
    assert shapes["model.embed_tokens.weight"] == (320 // 4, spec.hidden)
    # Four ranks share two key-value heads: each has one query head, and a whole key and value head.
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (3 * spec.head_size, spec.hidden)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (2 * spec.ffn // 4, spec.hidden)
    fetched = sum(piece.elements for piece, _ in places(made.pieces, worker[0]))
    assert fetched < 0.4 * sum(math.prod(tensor.shape) for tensor in tensors)
