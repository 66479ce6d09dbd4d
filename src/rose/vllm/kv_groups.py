"""Groups of KV blocks: the unit in which an engine on a page pool takes and returns memory.

A block of vLLM is a few kilobytes in each layer, and layers lie megabytes apart, so one block fills no page. A group is
the fewest neighbouring blocks that fill whole pages in every layer. `KvGroups` finds the pages of each group from the
strides that vLLM publishes with its KV configuration, for any layout. Block 0 is vLLM's null block, which padding and
graph capture touch, so the first group always has memory.

What cannot work on a pool is refused at start-up: memory without pages cannot be registered for transfer (connectors)
or be released as one piece (sleep mode).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rose.errors import ConfigError

NULL_GROUP = 0
GROUPS_MIN = 4  # with fewer, the null block's group and the headroom leave nothing to move
OFF_HINT = "serve without ROSE_KV_POOL; each engine then has KV memory of its own"


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The geometry of one engine's KV cache: where the pages of each group of blocks lie."""

    page_bytes: int
    blocks: int  # of one group
    count: int  # groups of the engine
    stride_bytes: int  # from a group to the next one, within a region
    regions: tuple[int, ...]  # where each region begins: one per layer, or one in all if blocks are outermost

    @property
    def pages(self) -> int:
        """Return the pages of one group, in all layers."""
        return len(self.regions) * (self.stride_bytes // self.page_bytes)

    @property
    def pages_total(self) -> int:
        return self.count * self.pages

    def places(self, groups: Iterable[int]) -> list[int]:
        """Return the pages of these groups as numbers from the start of the buffer, group by group."""
        size, page = self.stride_bytes // self.page_bytes, self.page_bytes
        starts = [(region + group * self.stride_bytes) // page for group in groups for region in self.regions]
        return [place for start in starts for place in range(start, start + size)]


def blocks_together(config: Any, page_bytes: int) -> int:
    """Return how many neighbouring blocks fill whole pages in every layer. Raises ConfigError."""
    tensors = config.kv_cache_tensors
    if not tensors:
        raise ConfigError("this model has no KV cache, so there is no memory to share", hint=OFF_HINT)
    if any(getattr(tensor, "host_resident", False) for tensor in tensors):
        raise ConfigError("a part of this model's KV cache lies in host memory, not on the device", hint=OFF_HINT)
    if any(not _has_whole_blocks(tensor, config.num_blocks) for tensor in tensors):
        raise ConfigError("this KV cache layout spreads a block of a layer over the whole layer", hint=OFF_HINT)
    strides = sorted({tensor.block_stride for tensor in tensors})
    if len(strides) > 1:
        raise ConfigError(f"the layers of this model have KV blocks of several sizes: {strides} bytes", hint=OFF_HINT)
    return math.lcm(page_bytes, strides[0]) // int(strides[0])


def check_count(count: int, blocks: int) -> None:
    """Raise ConfigError for too few groups to share."""
    if count < GROUPS_MIN:
        raise ConfigError(
            f"the KV memory is {count} groups of {blocks} blocks, and a pool needs {GROUPS_MIN}: too little to share",
            hint=f"give the engine more KV memory, or {OFF_HINT}",
        )


def groups_of(config: Any, page_bytes: int) -> KvGroups:
    """Return the geometry of a KV configuration of vLLM. Raises ConfigError for one that cannot lie on pages."""
    blocks = blocks_together(config, page_bytes)
    if config.num_blocks % blocks:
        raise ConfigError(
            f"{config.num_blocks} KV blocks are not whole groups of {blocks}",
            hint=f"give --num-gpu-blocks-override {config.num_blocks // blocks * blocks}",
        )
    count = config.num_blocks // blocks
    check_count(count, blocks)
    stride = blocks * config.kv_cache_tensors[0].block_stride
    regions = sorted({begin for tensor in config.kv_cache_tensors for begin in _regions(tensor)})
    crooked = [begin for begin in regions if begin % page_bytes]
    if crooked:
        raise ConfigError(f"a layer begins inside a page of {page_bytes} bytes, at {crooked[0]}", hint=OFF_HINT)
    return KvGroups(page_bytes, blocks, count, stride, tuple(regions))


def groups_of_ranks(configs: Sequence[Any], page_bytes: int) -> KvGroups:
    """Return the geometry that all ranks of an engine have. Raises ConfigError if they differ: groups move on all."""
    groups, *others = [groups_of(config, page_bytes) for config in configs]
    if any(other != groups for other in others):
        raise ConfigError("the ranks of this engine have KV caches of several forms", hint=OFF_HINT)
    return groups


def _has_whole_blocks(tensor: Any, blocks: int) -> bool:
    """Return whether a block of a layer is one piece of memory: not where heads lie outside of blocks."""
    return bool(tensor.block_stride > tensor.layer_stride or tensor.layer_stride <= blocks * tensor.block_stride)


def _regions(tensor: Any) -> list[int]:
    """Return where the layers of a tensor begin; with blocks outermost all layers of a block lie together."""
    if tensor.block_stride > tensor.layer_stride:
        return [0]
    return [tensor.offset + layer * tensor.layer_stride for layer in range(len(tensor.layers))]


def check_poolable(vllm_config: Any) -> None:
    """Raise ConfigError for settings of vLLM under which its KV memory cannot come and go."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ConfigError(
            f"this engine has {stages} pipeline stages, whose steps overlap; a pool works with tensor parallelism only",
            hint=OFF_HINT,
        )
    if vllm_config.kv_transfer_config is not None:
        raise ConfigError("a KV connector registers all KV memory, and a pool's comes and goes", hint=OFF_HINT)
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError("sleep mode releases all KV memory at once, and a pool's is shared", hint=OFF_HINT)
    if not str(vllm_config.scheduler_config.scheduler_cls).startswith("rose.vllm."):
        raise ConfigError(
            "ROSE_KV_POOL is set, and this server does not run one of ROSE's schedulers",
            hint="add --scheduler-cls rose.vllm.ServingScheduler (on a GPU: AsyncServingScheduler), or unset it",
        )
