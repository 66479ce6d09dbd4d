"""What rollouts lose when serving takes their pages: nothing that can be moved, and then the least work."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.contract.kinds import EngineKind, Output, ask, collect, embedded_kind, first_core, run

from rose.config.server_settings import EngineSettings
from rose.core.memory import MemoryPolicy
from rose.device import tenancy
from rose.device.pages import PagePool
from rose.device.tenancy import SharedMemory
from rose.engines.base import Request
from rose.engines.embedded.engine import EmbeddedEngine
from rose.engines.embedded.runner import block_bytes
from rose.models.model_folder import served_spec
from rose.models.presets import write_preset

PAGES, PAGE_BLOCKS, BLOCK_TOKENS = 40, 4, 16
SETTINGS = EngineSettings(kv_memory_mb=4, max_context_tokens=256, max_sequences=16)


@dataclass
class Device:
    memory: SharedMemory
    rollouts: EmbeddedEngine
    outputs: dict[str, Output]

    @property
    def aborted(self) -> set[str]:
        return {name for name, output in self.outputs.items() if output.finish_reason == "abort"}

    def leave_rollouts(self, pages: int) -> None:
        self.memory.owner_limit_pages = pages
        self.memory.observe()
        assert self.memory.rollout.share.held <= pages
        self.rollouts.scheduler.check()
        self.memory.pages.check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset("frozenlake-1m", tmp_path_factory.mktemp("model") / "tiny", seed=3)


@pytest.fixture(scope="module")
def kind(folder: Path) -> EngineKind:
    return embedded_kind(folder, folder)


@pytest.fixture
def device(folder: Path) -> Iterator[Device]:
    size = block_bytes(served_spec(folder))
    pages = PagePool(PAGES, PAGE_BLOCKS * size)
    memory = SharedMemory(
        pages, MemoryPolicy(PAGES), serving_block_bytes=size, rollout_block_bytes=size, now_s=lambda: 0.0
    )
    engine = EmbeddedEngine.load(folder, SETTINGS, device=first_core(), memory=memory.rollout.memory)
    made = Device(memory, engine, {})
    memory.lend_to(engine.scheduler, lambda events: collect(made.outputs, events))
    yield made
    engine.close()
    engine.limit_kv(0)
    for tenant in (memory.serving, memory.rollout):
        tenant.memory.pool.forget_digests()
        tenant.memory.pool.shrink(PAGES)
        tenant.share.memory.free()
    memory.pages.close()


def long_ones(count: int) -> list[Request]:
    """Each grows to five blocks, and holds four when it has said 40 tokens."""
    return [ask(f"long{i}", 20, prompt=i, max_tokens=60, seed=i) for i in range(count)]


def spread_out(device: Device, requests: list[Request]) -> None:
    """Long requests between short ones that end and leave cached blocks: the long ones stand in nearly every page."""
    for number, request in enumerate(requests):
        device.rollouts.add(request)
        device.rollouts.add(ask(f"short{number}", 70, prompt=100 + number, max_tokens=3))
    run(device.rollouts, steps=40, outputs=device.outputs)
    assert device.rollouts.facts().running == len(requests)


def test_rollouts_that_fit_elsewhere_move_and_keep_their_tokens(device: Device, kind: EngineKind) -> None:
    requests = long_ones(8)
    spread_out(device, requests)
    pool = device.memory.rollout.memory.pool
    needed = -(-sum(5 for _ in requests) // PAGE_BLOCKS)
    assert pool.pages_pinned > needed, "they stand in more pages than they need"
    device.leave_rollouts(needed)
    assert not device.aborted and device.memory.moved_blocks > 0
    run(device.rollouts, outputs=device.outputs)
    for request in requests:
        assert device.outputs[request.request_id].same_as(kind.alone(request))


def test_prefixes_are_found_where_they_moved_to(device: Device, kind: EngineKind) -> None:
    requests = long_ones(8)
    spread_out(device, requests)
    device.leave_rollouts(10)
    moved = device.memory.moved_blocks
    again = [ask(f"again{i}", 20, prompt=i, max_tokens=5, seed=i) for i in range(2)]
    for request in again:
        device.rollouts.add(request)
    run(device.rollouts, outputs=device.outputs)
    assert moved > 0
    for request in again:
        assert device.outputs[request.request_id].cached_tokens == BLOCK_TOKENS
        assert device.outputs[request.request_id].same_as(kind.alone(request))


def test_when_not_all_fit_the_least_work_is_evicted(device: Device, kind: EngineKind) -> None:
    requests = long_ones(8)
    spread_out(device, requests)
    late = [ask(f"late{i}", 30 + i, prompt=50 + i, max_tokens=30) for i in range(2)]
    for request in late:
        device.rollouts.add(request)
    run(device.rollouts, steps=2, outputs=device.outputs)
    device.leave_rollouts(8)
    assert device.aborted == {"late0", "late1"}, "32 blocks are room for the eight that have worked longest"
    run(device.rollouts, outputs=device.outputs)
    for request in requests:
        output = device.outputs[request.request_id]
        assert output.finish_reason == "length" and output.same_as(kind.alone(request))


def test_rollouts_give_up_the_pages_that_the_system_refuses_serving(
    device: Device, kind: EngineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    requests = long_ones(8)
    spread_out(device, requests)
    memory, serving = device.memory, device.memory.serving.memory.pool
    held, spare = memory.rollout.share.held, memory.pages.spare
    monkeypatch.setattr(os, "posix_fallocate", full)
    blocks = serving.allocate((spare + 2) * PAGE_BLOCKS)
    assert blocks is not None, "serving waits for a page while rollouts hold some"
    assert memory.rollout.share.held == memory.rollout.share.budget_pages == held - 2
    memory.pages.check()
    run(device.rollouts, outputs=device.outputs)
    for request in requests:
        output, alone = device.outputs[request.request_id], kind.alone(request)
        assert output.same_as(alone) == (request.request_id not in device.aborted)
    serving.release(blocks)


def test_copies_are_bounded_and_requests_in_the_way_are_evicted(
    device: Device, kind: EngineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = long_ones(8)
    spread_out(device, requests)
    monkeypatch.setattr(tenancy, "MOVED_BYTES_MAX", 2 * device.rollouts.scheduler.limits.block_bytes)
    device.leave_rollouts(8)
    assert device.memory.moved_blocks <= 2 and device.aborted
    run(device.rollouts, outputs=device.outputs)
    for request in requests:
        output, alone = device.outputs[request.request_id], kind.alone(request)
        assert output.token_ids == alone.token_ids[: len(output.token_ids)]
        assert output.same_as(alone) == (request.request_id not in device.aborted)
