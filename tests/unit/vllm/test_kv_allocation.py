"""vLLM's plan becomes whole groups, its one allocation becomes addresses of a pool, and pages go both ways."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rose.errors import ConfigError, Unavailable
from rose.vllm import discovery, kv_allocation
from rose.vllm.kv_allocation import copy_blocks, install, map_groups, plan_of, unmap_groups
from rose.vllm.status_segment import SegmentWriter, own_header

PAGE, BLOCK, LAYERS, AVAILABLE = 65536, 16384, 2, 22  # four blocks in a group, and memory for 22 blocks
CPU = torch.device("cpu")


class Vllm:
    """As much of vLLM's planning and allocation as is patched."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cache = SimpleNamespace(num_gpu_blocks_override=None)
        scheduler = SimpleNamespace(scheduler_cls="rose.vllm.ServingScheduler")
        self.config = SimpleNamespace(
            cache_config=self.cache,
            scheduler_config=scheduler,
            model_config=SimpleNamespace(enable_sleep_mode=False),
            kv_transfer_config=None,
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )
        self.pieces = self.ranks = 1
        self.planning = self._module(patch, "vllm.v1.engine.core", get_kv_cache_configs=self._plan)
        self.allocation = self._module(patch, "vllm.v1.worker.utils", torch=torch)
        self.allocation.allocate_kv_cache = self._allocate
        self.runner = self._module(patch, "vllm.v1.worker.gpu_model_runner", allocate_kv_cache=self._allocate)

    def _module(self, patch: pytest.MonkeyPatch, name: str, **content: Any) -> Any:
        module = ModuleType(name)
        module.__dict__.update(content)
        patch.setitem(sys.modules, name, module)
        return module

    def _plan(self, vllm_config: Any, specs: Any, memory: Any) -> Any:
        return [planned(self.cache.num_gpu_blocks_override or AVAILABLE) for _ in range(self.ranks)]

    def _allocate(self, config: Any, device: torch.device, layout: Any) -> Any:
        size = config.kv_cache_tensors[0].size // self.pieces
        return [self.allocation.torch.zeros(size, dtype=torch.int8, device=device) for _ in range(self.pieces)]

    def start(self) -> tuple[Any, Any]:
        """Return the configuration and the buffer of an engine that starts."""
        [config] = self.planning.get_kv_cache_configs(self.config, [{}], [0])
        [buffer] = self.runner.allocate_kv_cache(config, CPU, None)
        return config, buffer


def planned(blocks: int) -> Any:
    layers, size = [f"layer-{number}" for number in range(LAYERS)], LAYERS * BLOCK * blocks
    tensor = SimpleNamespace(size=size, layers=layers, layer_stride=BLOCK * blocks, block_stride=BLOCK, offset=0)
    return SimpleNamespace(num_blocks=blocks, kv_cache_tensors=[tensor])


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    monkeypatch.setenv(discovery.FOLDER_VARIABLE, str(tmp_path / "segments"))
    monkeypatch.setattr(kv_allocation, "PAGE_BYTES", PAGE)
    monkeypatch.setattr(kv_allocation, "_pool", None)
    made = Vllm(monkeypatch)
    install(kv_allocation.AUTO, is_serving=True)
    yield made
    if kv_allocation._pool is not None:
        kv_allocation._pool.share.close()


def rows(buffer: Any, layer: int) -> Any:
    return buffer[layer * (buffer.numel() // LAYERS) :][: buffer.numel() // LAYERS].view(-1, BLOCK)


def test_a_plan_is_cut_to_whole_groups_and_marked(vllm: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.rose"):
        [config] = vllm.planning.get_kv_cache_configs(vllm.config, [{}], [0])
    assert "20 of 22 KV blocks" in caplog.messages[0]
    plan = plan_of(config)
    assert plan is not None and plan.is_serving
    assert (config.num_blocks, plan.groups.blocks, plan.groups.count) == (20, 4, 5)
    assert Path(plan.folder).parent == discovery.segment_folder()
    assert vllm.cache.num_gpu_blocks_override is None, "as the owner set it"


def test_memory_for_hardly_any_group_is_refused(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_allocation, "PAGE_BYTES", PAGE * 16)
    with pytest.raises(ConfigError, match="0 groups of 64 blocks"):
        vllm.planning.get_kv_cache_configs(vllm.config, [{}], [0])


def test_the_cache_lies_on_pages_that_come_and_go(vllm: Vllm) -> None:
    _, buffer = vllm.start()
    assert buffer.numel() == 20 * LAYERS * BLOCK and buffer.data_ptr() % PAGE == 0
    pool = kv_allocation._worker_pool()
    assert pool.share.held == LAYERS, "the null block's group"
    assert map_groups(None, [1, 2]).groups == (1, 2) and pool.share.held == 3 * LAYERS
    for layer in range(LAYERS):
        rows(buffer, layer)[4:12] = 7
    unmap_groups(None, [1])
    assert pool.share.held == 2 * LAYERS and map_groups(None, [1]).groups == (1,)
    assert all(int(rows(buffer, layer)[4:8].sum()) == 0 for layer in range(LAYERS)), "wiped"
    assert all(int(rows(buffer, layer)[8:12].min()) == 7 for layer in range(LAYERS))


def test_a_group_is_mapped_whole_or_not_at_all(vllm: Vllm) -> None:
    vllm.start()
    pool = kv_allocation._worker_pool()
    assert map_groups(None, [1, 2, 3]).groups == (1, 2, 3)
    page = next(page for page in range(pool.share.ledger.pages) if pool.share.ledger.is_free(page))
    assert pool.share.ledger.try_own(page), "as if a rollout engine had it"
    assert map_groups(None, [4]).groups == () and pool.share.held == 4 * LAYERS
    pool.share.ledger.give_up([page])


def test_blocks_are_copied_in_every_layer(vllm: Vllm) -> None:
    _, buffer = vllm.start()
    map_groups(None, [1])
    for layer in range(LAYERS):
        for block in (5, 6):
            rows(buffer, layer)[block] = 10 * layer + block
    copy_blocks(None, [(5, 1), (6, 2)])
    assert [int(rows(buffer, layer)[block, 0]) for layer in range(LAYERS) for block in (1, 2)] == [5, 6, 15, 16]


def test_every_rank_has_a_pool_of_its_own(vllm: Vllm) -> None:
    vllm.ranks = 2
    plans = [plan_of(config) for config in vllm.planning.get_kv_cache_configs(vllm.config, [{}] * 2, [0] * 2)]
    assert [(plan.rank, plan.ranks) for plan in plans if plan is not None] == [(0, 2), (1, 2)]
    pools = []
    for plan in plans:
        assert plan is not None
        pools.append(kv_allocation._WorkerPool(plan, CPU))
    folder = Path(pools[0].share.ledger.path).parents[1]
    assert [pool.share.ledger.path.parent for pool in pools] == [folder / "rank-0", folder / "rank-1"]
    assert pools[0].map([0, 1]) == [0, 1] and pools[1].share.held == 0
    joined = kv_allocation._WorkerPool(replace(plans[1], is_serving=False), CPU)  # type: ignore[type-var]
    assert joined.share.free_pages() == 5 * LAYERS, "of rank 1, not of rank 0"
    for pool in (joined, *pools):
        pool.share.close()


def test_a_call_that_fails_in_a_worker_answers_why(vllm: Vllm) -> None:
    vllm.start()
    for reply in (map_groups(None, [0]), copy_blocks(None, [(99, 1)])):
        assert reply.failure and not reply.groups
    assert map_groups(None, [1]).groups == (1,)


def test_a_cache_for_profiling_is_left_to_vllm(vllm: Vllm) -> None:
    [buffer] = vllm.allocation.allocate_kv_cache(planned(4), CPU, None)
    assert buffer.numel() == 4 * LAYERS * BLOCK and kv_allocation._pool is None


def test_an_allocation_in_several_pieces_is_refused(vllm: Vllm) -> None:
    vllm.pieces = 2
    with pytest.raises(ConfigError, match="not as one"):
        vllm.start()
    assert kv_allocation._pool is None and vllm.allocation.torch is torch


def test_a_rollout_engine_asks_serving_for_its_first_pages(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = vllm.start()
    plan, serving = plan_of(config), kv_allocation._worker_pool()
    assert plan is not None
    map_groups(None, [1, 2, 3, 4])
    sizes = {"step_tokens": 1, "sequences": 1, "kv_blocks": 1, "block_bytes": 1, "block_tokens": 16}
    header = own_header("vllm", "m", **sizes, pool=(plan.folder, plan.groups.pages_total, PAGE, LAYERS, 4, 1))
    writer = SegmentWriter(discovery.new_segment_path(), header)

    def sleep(seconds: float) -> None:
        assert writer.wanted_pages(time.monotonic()) == LAYERS
        serving.share.give_back(plan.groups.places([4]))

    monkeypatch.setattr(kv_allocation.time, "sleep", sleep)
    joined = kv_allocation._WorkerPool(replace(plan, is_serving=False), CPU)
    kv_allocation._map_null_group(joined, replace(plan, is_serving=False))
    assert joined.share.held == LAYERS and serving.share.held == 4 * LAYERS
    joined.share.close()
    writer.close()


def test_an_engine_without_a_page_for_its_first_blocks_is_refused(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = vllm.start()
    plan = plan_of(config)
    assert plan is not None
    map_groups(None, [1, 2, 3, 4])
    monkeypatch.setattr(kv_allocation, "JOIN_S", -1.0)
    joined = kv_allocation._WorkerPool(replace(plan, is_serving=False), CPU)
    with pytest.raises(Unavailable, match="no 2 free pages"):
        kv_allocation._map_null_group(joined, replace(plan, is_serving=False))
    joined.share.close()


def test_vllm_is_patched_once(vllm: Vllm) -> None:
    before = vllm.planning.get_kv_cache_configs
    install("another", is_serving=True)
    assert vllm.planning.get_kv_cache_configs is before
