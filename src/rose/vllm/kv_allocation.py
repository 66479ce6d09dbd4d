"""vLLM's KV cache on a pool of pages: the patch of its planning and of its one allocation, and what the worker does.

vLLM plans its KV cache in the engine's process and allocates it in the worker's by one call of `torch.zeros`. With
ROSE_KV_POOL set the plan is cut to whole groups of blocks and marked; the allocation of a marked plan gets addresses of
a `PoolShare` in place of memory. Everything above the addresses stays vLLM's own: views, kernels, block tables, graphs.
The serving engine creates the pool, a rollout engine joins it. The worker holds the locks and mappings of its pages,
so both end with its process. The scheduler calls `map_groups`, `unmap_groups` and `copy_blocks` in the worker.

With tensor parallelism an engine has a worker per rank. Every rank has a pool of its own, because its pages lie on its
own device, and rank r of a rollout engine joins the pool of rank r of serving. The calls return an error instead of
raising it: an exception in one rank would leave the answers of the other ranks unread in vLLM's queues.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rose.device.kv_pool.exchange import create_pool, join_pool
from rose.device.kv_pool.pool_share import PoolShare
from rose.errors import ConfigError, Unavailable
from rose.private_files import make_private_folder
from rose.vllm.discovery import live_segments, new_pool_folder
from rose.vllm.kv_groups import (
    NULL_GROUP,
    OFF_HINT,
    KvGroups,
    blocks_together,
    check_count,
    check_poolable,
    groups_of_ranks,
)
from rose.vllm.status_segment import SegmentReader

logger = logging.getLogger("vllm.rose")

AUTO = "auto"
PAGE_BYTES = 2 << 20  # the smallest page of a GPU's virtual memory
MARK = "rose_pool"  # an attribute of vLLM's KVCacheConfig, which is pickled with it on the way to the worker
ALLOCATORS = ("vllm.v1.worker.utils", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")  # and users
ASK_S = 0.5  # between two requests for the first pages
LOSS_SHARE = 0.03  # of the KV blocks, that whole groups may lose without a word
JOIN_S = 60.0  # thousands of descriptors of a large pool


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The mark of a KV configuration whose memory comes from a pool."""

    folder: str
    is_serving: bool
    groups: KvGroups  # of every rank
    rank: int = 0
    ranks: int = 1

    @property
    def rank_folder(self) -> Path:
        """Return the folder of this rank's pool."""
        return Path(self.folder) if self.ranks == 1 else Path(self.folder) / f"rank-{self.rank}"


@dataclass(frozen=True, slots=True)
class RankReply:
    """What one rank's worker has done: the groups that have memory now, or why it failed."""

    groups: tuple[int, ...] = ()
    failure: str = ""


def plan_of(config: Any) -> PoolPlan | None:
    """Return the pool of a KV configuration of vLLM, if its memory comes from one."""
    plan: PoolPlan | None = getattr(config, MARK, None)
    return plan


def install(folder: str, *, is_serving: bool) -> None:
    """Patch vLLM in this process, once, so that its KV memory comes from the pool of this folder."""
    planning: Any = import_module("vllm.v1.engine.core")
    allocation: Any = import_module("vllm.v1.worker.utils")
    if getattr(planning.get_kv_cache_configs, "is_roses", False):
        return
    plain_plan, plain_allocate = planning.get_kv_cache_configs, allocation.allocate_kv_cache

    def get_kv_cache_configs(vllm_config: Any, specs: Any, memory: Any) -> Any:
        return _planned(plain_plan, vllm_config, specs, memory, folder, is_serving)

    def allocate_kv_cache(config: Any, *arguments: Any, **options: Any) -> Any:
        plan = plan_of(config)
        if plan is None:  # a small cache for profiling
            return plain_allocate(config, *arguments, **options)
        return _allocated(plain_allocate, allocation, plan, config, *arguments, **options)

    get_kv_cache_configs.is_roses = True  # type: ignore[attr-defined]
    planning.get_kv_cache_configs = get_kv_cache_configs
    for name in ALLOCATORS:
        module: Any = sys.modules.get(name)
        if module is not None:
            module.allocate_kv_cache = allocate_kv_cache


def _planned(plain: Any, vllm_config: Any, specs: Any, memory: Any, folder: str, is_serving: bool) -> Any:
    """Return vLLM's plan in whole groups, marked. Raises ConfigError where there can be no pool."""
    check_poolable(vllm_config)
    configs, cache = plain(vllm_config, specs, memory), vllm_config.cache_config
    together = blocks_together(configs[0], PAGE_BYTES)
    available = configs[0].num_blocks
    check_count(available // together, together)
    whole, before = available // together * together, cache.num_gpu_blocks_override
    if whole < available * (1 - LOSS_SHARE):
        text = "ROSE: %d of %d KV blocks are used, in whole groups of %d; with more memory less is lost"
        logger.warning(text, whole, available, together)
    if whole != available:
        cache.num_gpu_blocks_override = whole
        try:
            configs = plain(vllm_config, specs, memory)
        finally:
            cache.num_gpu_blocks_override = before
    if is_serving and folder == AUTO:
        folder = str(new_pool_folder())
    plan = PoolPlan(folder, is_serving, groups_of_ranks(configs, PAGE_BYTES), ranks=len(configs))
    for rank, config in enumerate(configs):
        setattr(config, MARK, replace(plan, rank=rank))
    return configs


# In the worker


class _WorkerPool:
    """The pages of this worker's engine, and the buffer of addresses that they come and go behind."""

    def __init__(self, plan: PoolPlan, device: Any) -> None:
        self.groups = plan.groups
        kind, number = "memfd" if device.type == "cpu" else device.type, device.index or 0
        folder, pages = plan.rank_folder, plan.groups.pages_total
        if plan.is_serving:
            make_private_folder(Path(plan.folder))
            ledger, backend, self._server = create_pool(
                folder, pages, kind, page_bytes=plan.groups.page_bytes, device=number
            )
        else:
            ledger, backend = join_pool(folder, device=number, timeout_s=JOIN_S)
        self.share = PoolShare(ledger, backend, pages)
        self.buffer: Any = None

    def map(self, groups: Sequence[int]) -> list[int]:
        acquired = self.share.acquire(self.groups.places(groups))
        whole, rest = divmod(len(acquired), self.groups.pages)
        if rest:
            self.share.give_back(acquired[-rest:])
        return list(groups[:whole])

    def blocks_of(self, region: int) -> Any:
        """Return a region of the buffer as rows of one block each. Only blocks with memory may be touched."""
        groups = self.groups
        size, end = groups.stride_bytes // groups.blocks, region + groups.count * groups.stride_bytes
        return self.buffer[region:end].view(-1, size)


_pool: _WorkerPool | None = None


def _allocated(plain: Any, module: Any, plan: PoolPlan, config: Any, device: Any, *rest: Any, **options: Any) -> Any:
    """Return vLLM's KV cache over addresses of a pool. Raises ConfigError if vLLM allocates in another way."""
    global _pool
    sizes: list[int] = []

    def zeros(size: int, *, dtype: Any, device: Any) -> Any:
        global _pool
        sizes.append(size)
        if sizes != [plan.groups.pages_total * plan.groups.page_bytes]:
            return module.torch.empty(0, dtype=dtype)  # refused below
        _pool = _WorkerPool(plan, device)
        _map_null_group(_pool, plan)
        _pool.buffer = _tensor_at(_pool.share.address, size, dtype, device)
        return _pool.buffer

    with _zeros_by(module, zeros):
        caches = plain(config, device, *rest, **options)
    if sizes != [plan.groups.pages_total * plan.groups.page_bytes]:
        raise ConfigError(f"vLLM allocates its KV cache in pieces of {sizes} bytes, and not as one", hint=OFF_HINT)
    return caches


def _map_null_group(pool: _WorkerPool, plan: PoolPlan) -> None:
    """Map the first group. Serving may hold all pages for its prefix cache, so a rollout engine asks for some."""
    deadline_s = time.monotonic() + JOIN_S
    while pool.map([NULL_GROUP]) != [NULL_GROUP]:
        now_s = time.monotonic()
        if plan.is_serving or now_s > deadline_s:
            raise Unavailable(
                f"the KV pool has no {plan.groups.pages} free pages for the first group of blocks",
                hint="start the rollout engine when serving is less busy",
            )
        for path, header in live_segments():
            if header.pool == plan.folder:
                reader = SegmentReader(path)
                reader.want(plan.groups.pages, now_s + ASK_S, now_s)
                reader.close()
        time.sleep(ASK_S)


@contextmanager
def _zeros_by(module: Any, zeros: Callable[..., Any]) -> Iterator[None]:
    """Replace `torch.zeros` as one module sees it."""
    torch = module.torch

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return zeros if name == "zeros" else getattr(torch, name)

    module.torch = Torch()
    try:
        yield
    finally:
        module.torch = torch


def _tensor_at(address: int, size: int, dtype: Any, device: Any) -> Any:
    torch: Any = sys.modules["torch"]  # vLLM has loaded it
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (size,))


def _worker_pool() -> _WorkerPool:
    assert _pool is not None, f"process {os.getpid()} has no KV cache on a pool"
    return _pool


def map_groups(worker: Any, groups: Sequence[int]) -> RankReply:
    """Put memory behind these groups of blocks, as far as there are free pages. Return those that have it now."""
    try:
        return RankReply(tuple(_worker_pool().map(groups)))
    except Exception as error:
        return _failed(error)


def unmap_groups(worker: Any, groups: Sequence[int]) -> RankReply:
    """Give the memory of these groups back to the pool, wiped. A group without memory stays as it is."""
    try:
        pool = _worker_pool()
        pool.share.give_back([place for place in pool.groups.places(groups) if pool.share.has(place)])
        return RankReply()
    except Exception as error:
        return _failed(error)


def copy_blocks(worker: Any, moves: Sequence[tuple[int, int]]) -> RankReply:
    """Copy blocks, each from its first number to its second one, in every layer."""
    try:
        pool = _worker_pool()
        torch: Any = sys.modules["torch"]
        sources, targets = (torch.tensor(numbers, device=pool.buffer.device) for numbers in zip(*moves, strict=True))
        for region in pool.groups.regions:
            blocks = pool.blocks_of(region)
            blocks.index_copy_(0, targets, blocks.index_select(0, sources))
        return RankReply()
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> RankReply:
    logger.error("ROSE: a call of the scheduler failed in this worker", exc_info=error)
    return RankReply(failure=str(error) or type(error).__name__)
