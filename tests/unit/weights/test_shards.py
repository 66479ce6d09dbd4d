"""Plans: chunks are shared out among ranks, and layouts that do not fit are refused."""

from __future__ import annotations

import pytest
from tests.property.test_shards import assert_filled_once

from rose.weights.layouts import (
    Rule,
    tensor_parallel,
    whole,
)
from rose.weights.shards import LayoutError, Tensor, places, plan


def test_what_several_hold_is_shared_out_among_them():
    tensors = [Tensor(f"t{index}", (10, 10)) for index in range(8)]
    made = plan(tensors, [whole(tensors)] * 4)
    assert sorted(made.owners) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_piece_across_a_workers_edge_is_refused():
    tensors = [Tensor("a", (6, 2))]
    made = plan(tensors, [whole(tensors)])
    with pytest.raises(LayoutError, match="not cut where"):
        places(made.chunks, tensor_parallel(tensors, {"a": Rule(0, 6)}, 2)[0])


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
    assert_filled_once(tensors, plan(tensors, layout).chunks)
