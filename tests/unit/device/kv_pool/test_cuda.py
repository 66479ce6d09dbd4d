"""A pool of GPU pages on the stand-in for the driver: every call fails once, and nothing is lost or left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cuda_standin.build import StandIn

from rose.device.kv_pool import exchange
from rose.device.kv_pool.cuda import CudaBackend
from rose.device.kv_pool.cuda_driver import SIGNATURES
from rose.device.kv_pool.exchange import create_pool, join_pool
from rose.device.kv_pool.pool_share import PoolShare
from rose.errors import ConfigError, RoseError, Unavailable

PAGES, PAGE = 5, 2 << 20
# What a failed release leaves: the driver has refused to take it back, and says nothing more.
LEFT_BY = {"cuMemRelease": "handles", "cuDevicePrimaryCtxRelease": "contexts", "cuStreamDestroy": "streams"}
CALLS = [name.removesuffix("_v2") for name in SIGNATURES if name != "cuGetErrorName"]


@pytest.fixture(autouse=True)
def loaded(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ROSE_CUDA_DRIVER", str(standin.path))
    yield
    standin.reset()


class TwoEngines:
    """A serving engine and a borrower in one process; a step of their life that is refused is tried again."""

    def __init__(self, folder: Path, standin: StandIn) -> None:
        self.folder, self.standin = folder, standin
        self.refused: list[str] = []
        self.shares: list[PoolShare] = []

    def run(self) -> None:
        serving = self.attempt(lambda: create_pool(self.folder, PAGES, "cuda"))
        first = self.attempt(lambda: PoolShare(serving[0], serving[1], 8))
        self.shares.append(first)
        assert self.attempt(lambda: first.acquire([4, 0, 1])) == [4, 0, 1]
        self.attempt(lambda: first.give_back([place for place in (4, 1) if first.has(place)]))
        borrower = self.attempt(lambda: join_pool(self.folder, timeout_s=10))
        second = self.attempt(lambda: PoolShare(*borrower, 8))
        self.shares.append(second)
        assert self.attempt(lambda: second.acquire([0, 1, 2, 3, 5])) == [0, 1, 2, 3]
        for close in (second.close, first.close, serving[2].close, borrower[1].close, serving[1].close):
            self.attempt(close)
        for ledger in (borrower[0], serving[0]):
            assert ledger.held == 0
            ledger.close()

    def attempt(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except RoseError as error:
            self.refused.append(error.what)
            assert all(share.held == share.ledger.held for share in self.shares), "a page without a lock"
            assert sum(share.held for share in self.shares) >= self.standin.counts()["mappings"]
            return step()


@pytest.mark.parametrize("use", [1, 2, 3, 5])
@pytest.mark.parametrize("name", CALLS)
def test_any_call_may_fail_once(
    tmp_path: Path, standin: StandIn, monkeypatch: pytest.MonkeyPatch, name: str, use: int
) -> None:
    monkeypatch.setattr(exchange, "BATCH_MAX", 2)
    engines = TwoEngines(tmp_path / "pool", standin)
    standin.fail(f"{name}:{use}:999")
    engines.run()
    assert len(engines.refused) == 1 or (use > 1 and not engines.refused)
    assert all(f"{name} failed: CUDA_ERROR_UNKNOWN" in what or "handed over" in what for what in engines.refused)
    left = {what: count for what, count in standin.counts().items() if count}
    left.pop("created_bytes", None)
    assert left in ({}, {LEFT_BY.get(name): 1})


def test_nothing_fails_when_no_call_does(tmp_path: Path, standin: StandIn) -> None:
    engines = TwoEngines(tmp_path / "pool", standin)
    engines.run()
    assert not engines.refused and not any(standin.counts().values())


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess", "cuMemsetD8Async", "cuStreamSynchronize"])
@pytest.mark.parametrize("undo", ["cuMemUnmap", "cuCtxSynchronize"])
def test_a_roll_back_that_fails_too_keeps_the_lock(tmp_path: Path, standin: StandIn, name: str, undo: str) -> None:
    ledger, backend, server = create_pool(tmp_path / "pool", PAGES, "cuda")
    share = PoolShare(ledger, backend, 8)
    standin.fail(f"{name}:1:999,{undo}:1:999:*")
    with pytest.raises(Unavailable, match=name):
        share.acquire([0])
    mapped = standin.counts()["mappings"]
    assert share.held == ledger.held >= mapped and not share.has(0)
    standin.fail()
    assert share.acquire([0]) == [0] and ledger.held == 1 == standin.counts()["mappings"]
    for one in (share, server, backend, ledger):
        one.close()
    assert not any(standin.counts().values())


def test_a_gpu_that_is_too_small_is_refused_in_words(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_BYTES", str(3 * PAGE))
    with pytest.raises(Unavailable, match=f"room for 3 of {PAGES} KV pages.*CUDA_ERROR_OUT_OF_MEMORY"):
        CudaBackend.create(PAGES)
    assert not any(standin.counts().values())


def test_pages_that_the_gpu_cannot_make_are_refused(standin: StandIn) -> None:
    with pytest.raises(ConfigError, match=f"take a multiple of {PAGE}"):
        CudaBackend.create(PAGES, 64 << 10)
    assert not any(standin.counts().values())


def test_a_pool_of_another_gpu_is_refused(tmp_path: Path, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = create_pool(tmp_path / "pool", PAGES, "cuda")
    monkeypatch.setenv("STANDIN_UUID", "T")
    with pytest.raises(ConfigError, match="on another GPU"):
        join_pool(tmp_path / "pool", timeout_s=10)
    with pytest.raises(Unavailable, match="INVALID_DEVICE"):
        CudaBackend.create(PAGES, device=7)
    for one in reversed(serving):
        one.close()
    assert not any(standin.counts().values())
