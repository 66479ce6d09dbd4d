"""Layouts of any kind, cut into chunks: all is there once, everybody finds whole chunks, and the bytes are right."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.chain_ends import Member, Trainer, equal, random_weights, shard, stepped

from rose.core.versions import VersionId
from rose.weights.layouts import (
    Rule,
    flat_shards,
    fuse_each_layer,
    pipeline,
    row_shards,
    tensor_parallel,
    tie,
    whole,
)
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.shards import LayoutError, Tensor, TensorRegion, bounds, check_cover, places, plan

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


def start_ranks(relay, tensors, layout, workers, limit):
    options = {"tensors": tensors, "layout": layout, "workers": workers, "chunk_elements_max": limit}
    first = Trainer(relay, **options)
    return [first, *(Trainer(relay, rank=rank, epoch=1, **options) for rank in range(1, len(layout)))]


def publish_all(ranks, version, weights, layout):
    """Every rank pushes its own chunks, the first one commits; only the relay joins them."""
    base = ranks[0].writer.newest
    drafts = []
    for rank in ranks:
        rank.writer.newest, rank.is_broken = base, False
        drafts.append(rank.push(version, shard(weights, layout[rank.rank]), anchor=base is None))
    for draft in drafts[1:]:
        draft.put_rank_manifest()
    drafts[0].collect_rank_manifests(range(len(ranks)))
    drafts[0].commit()


def assert_filled_once(tensors, chunks):
    count = {tensor.name: np.zeros(tensor.shape, int) for tensor in tensors}
    for chunk in chunks:
        count[chunk.tensor][tuple(map(slice, chunk.start, chunk.stop))] += 1
    assert all(np.all(times == 1) for times in count.values())


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
    members = [Member(relay, tensors=tensors, placements=h, weights=None) for worker in workers for h in worker]
    for member in members:
        for array in member.arrays.values():
            array[...] = 0  # padding must stay as it was
    for version in (1, 2):
        publish_all(ranks, version, weights, layout)
        for member in members:
            assert member.sync() == VersionId(1, version)
            assert equal(member.arrays, shard(weights, member.placements))
        weights = stepped(weights, version)


@given(st.data())
def test_a_plan_covers_everything_once_and_cuts_where_workers_need_it(data):
    tensors, rules = data.draw(transformers())
    layout = trainer_layouts(data.draw, tensors, rules)
    workers = [worker_layout(data.draw, tensors, rules)]
    made = plan(tensors, layout, workers, chunk_elements_max=data.draw(st.integers(1, 50)))
    assert_filled_once(tensors, made.chunks)
    for chunk, owner in zip(made.chunks, made.owners):
        assert any(chunk.is_within(placement.region) for placement in layout[owner])
    for placements in workers[0]:
        placed = places(made.chunks, placements)
        assert sum(chunk.elements for chunk, _ in placed) == sum(placement.region.elements for placement in placements)
    assert plan(tensors, layout, workers, chunk_elements_max=10**6) == plan(
        tensors, layout, workers, chunk_elements_max=10**6
    )


@given(
    regions=st.lists(st.tuples(*[st.integers(0, 4)] * 4), min_size=0, max_size=6),
)
def test_covering_once_is_recognised(regions):
    tensor = Tensor("a", (4, 4))
    cut = [
        TensorRegion("a", (min(a, b), min(c, d)), (max(a, b), max(c, d))) for a, b, c, d in regions if a != b and c != d
    ]
    count = np.zeros((4, 4), int)
    for region in cut:
        count[tuple(map(slice, region.start, region.stop))] += 1
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
    joined = [shard({"a": values}, placements).get("a", np.empty(0, np.uint16)) for placements in layout]
    assert np.array_equal(np.concatenate(joined), values.reshape(-1))
    assert_filled_once([tensor], [placement.region for placements in layout for placement in placements])
