"""Layouts of trainers and workers: padding, groups, stages, and degrees that do not divide."""

from __future__ import annotations

import math

import numpy as np
from tests.contract.chain_ends import shard

from rose.models.presets import PRESETS, preset_spec
from rose.weights.layouts import (
    Rule,
    fuse,
    fuse_each_layer,
    local_shapes,
    pipeline,
    rules_of,
    tensor_parallel,
    tensors_of,
    whole,
)
from rose.weights.shards import Tensor, places, plan


def test_few_key_value_heads_are_held_by_several_ranks():
    tensors = [Tensor("k", (4, 3))]
    layout = tensor_parallel(tensors, {"k": Rule(0, 2)}, 4)
    assert [placements[0].region.start[0] for placements in layout] == [0, 0, 2, 2]
    assert [region.start[0] for region in plan(tensors, layout).chunks] == [0, 2]


def test_padding_belongs_to_nobody():
    tensors = [Tensor("embed", (10, 2))]
    layout = tensor_parallel(tensors, {"embed": Rule(0, 16, 16)}, 4)
    assert [local_shapes(placements).get("embed") for placements in layout] == [(4, 2), (4, 2), (4, 2), None]
    assert [placement.region.shape for placements in layout for placement in placements] == [(4, 2), (4, 2), (2, 2)]


def test_groups_alternate_when_fused():
    """As Megatron does: the query heads of a group, its key, its value, then the next group."""
    tensors = [Tensor("q", (4, 1)), Tensor("k", (2, 1)), Tensor("v", (2, 1))]
    (placements,) = fuse([whole(tensors)], ["q", "k", "v"], "qkv", groups=2)
    values = {"q": [[1], [2], [3], [4]], "k": [[10], [20]], "v": [[100], [200]]}
    local = shard({name: np.array(rows, np.uint16) for name, rows in values.items()}, placements)
    assert local["qkv"].reshape(-1).tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_pipeline_stages_have_their_layers_and_both_ends_a_tied_embedding():
    names = ["model.embed_tokens.weight", *(f"model.layers.{n}.w" for n in range(3)), "model.norm.weight"]
    layout = pipeline([whole([Tensor(name, (2, 2)) for name in names])], 3, 2, tied=names[0])
    assert [[placement.local for placement in placements] for placements in layout] == [
        names[:3],
        [names[0], *names[3:]],
    ]


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
    fetched = sum(chunk.elements for chunk, _ in places(made.chunks, worker[0]))
    assert fetched < 0.4 * sum(math.prod(tensor.shape) for tensor in tensors)
