"""Groups of blocks are whole pages in every layer, in any layout; what cannot be is refused in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.vllm.kv_groups import blocks_together, check_poolable, groups_of, groups_of_ranks

PAGE = 4096


def config(layers: int, block_bytes: int, blocks: int, *, is_block_outer: bool = False, **changes: Any) -> Any:
    """Return a KV configuration as vLLM plans it, of one tensor."""
    outer, inner = blocks * block_bytes, layers * block_bytes
    plain: dict[str, Any] = {
        "size": layers * blocks * block_bytes,
        "layers": [f"layer-{number}" for number in range(layers)],
        "layer_stride": block_bytes if is_block_outer else outer,
        "block_stride": inner if is_block_outer else block_bytes,
        "offset": 0,
    }
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[SimpleNamespace(**{**plain, **changes})])


@given(st.integers(1, 5), st.sampled_from([512, 1536, 4096, 6144, 8192]), st.integers(4, 9), st.booleans())
def test_every_page_belongs_to_one_group_and_holds_only_its_blocks(
    layers: int, block_bytes: int, count: int, is_block_outer: bool
) -> None:
    together = blocks_together(config(layers, block_bytes, 1 << 12, is_block_outer=is_block_outer), PAGE)
    layout = config(layers, block_bytes, count * together, is_block_outer=is_block_outer)
    groups, tensor = groups_of(layout, PAGE), layout.kv_cache_tensors[0]
    assert (groups.blocks, groups.count) == (together, count)
    assert groups.pages_total * PAGE == tensor.size
    assert sorted(groups.places(range(count))) == list(range(groups.pages_total))
    for group in range(count):
        pages = set(groups.places([group]))
        assert len(pages) == groups.pages
        for block in range(group * together, (group + 1) * together):
            for layer in range(layers):
                begin = layer * tensor.layer_stride + block * tensor.block_stride
                assert set(range(begin // PAGE, -(-(begin + block_bytes) // PAGE))) <= pages


def test_a_group_of_a_real_shape_has_the_pages_of_every_layer() -> None:
    """Qwen3-8B: 36 layers, 4 KiB per token and layer, blocks of 16 tokens."""
    layout = config(36, 65536, 32 * 8)
    groups = groups_of(layout, 2 << 20)
    assert (groups.blocks, groups.pages, groups.count) == (32, 36, 8)
    outer = groups_of(config(36, 65536, 32 * 8, is_block_outer=True), 2 << 20)
    assert (outer.blocks, outer.pages) == (8, 9)


@pytest.mark.parametrize(
    "layout, words",
    [
        (SimpleNamespace(num_blocks=1, kv_cache_tensors=[]), "no KV cache"),
        (config(2, PAGE, 8, host_resident=True), "host memory"),
        (config(2, PAGE, 8, layer_stride=PAGE * 8 * 4), "spreads a block"),
        (config(2, 1024, 10), "not whole groups of 4"),
        (config(2, 1024, 12), "too little to share"),
        (config(2, PAGE, 8, offset=512), "inside a page"),
    ],
)
def test_a_layout_that_cannot_lie_on_pages_is_refused(layout: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        groups_of(layout, PAGE)


def test_blocks_of_several_sizes_are_refused() -> None:
    layout = config(2, PAGE, 8)
    layout.kv_cache_tensors += config(1, 2 * PAGE, 8).kv_cache_tensors
    with pytest.raises(ConfigError, match="several sizes"):
        groups_of(layout, PAGE)


def vllm_config(**changes: Any) -> Any:
    plain = {
        "kv_transfer_config": None,
        "enable_sleep_mode": False,
        "scheduler_cls": "rose.vllm.ServingScheduler",
        "pipeline_parallel_size": 1,
    }
    found = SimpleNamespace(**{**plain, **changes})
    return SimpleNamespace(
        kv_transfer_config=found.kv_transfer_config,
        model_config=found,
        scheduler_config=found,
        parallel_config=found,
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pipeline_parallel_size": 2}, "2 pipeline stages"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"enable_sleep_mode": True}, "sleep mode"),
        ({"scheduler_cls": None}, "one of ROSE's schedulers"),
    ],
)
def test_settings_under_which_memory_cannot_come_and_go_are_refused(changes: dict[str, Any], words: str) -> None:
    check_poolable(vllm_config())
    with pytest.raises(ConfigError, match=words):
        check_poolable(vllm_config(**changes))


def test_ranks_whose_caches_differ_are_refused() -> None:
    assert groups_of_ranks([config(2, 1024, 16)] * 2, PAGE) == groups_of(config(2, 1024, 16), PAGE)
    with pytest.raises(ConfigError, match="several forms"):
        groups_of_ranks([config(2, 1024, 16), config(2, 1024, 20)], PAGE)
