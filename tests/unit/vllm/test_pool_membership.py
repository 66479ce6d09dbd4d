"""The agent joins the pool that serving offers, and sees an engine that keeps serving from its pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.vllm.control_segment import Status
from rose.vllm.engine_process import RolloutEngineSettings
from rose.vllm.pool_membership import HAND_OVER_S_MAX, PoolMembership
from rose.vllm.status_segment import SegmentWriter, own_header

ENGINE = RolloutEngineSettings(Path("model"), kv_memory_mb=64)


def segment(path: Path, pool: tuple[str, int, int, int, int, int]) -> SegmentWriter:
    sizes = {"step_tokens": 1, "sequences": 1, "kv_blocks": 1, "block_bytes": 1, "block_tokens": 16}
    return SegmentWriter(path, own_header("vllm", "m", **sizes, pool=pool))


@pytest.fixture
def pooled(tmp_path: Path) -> Iterator[SegmentWriter]:
    writer = segment(tmp_path / "pooled", ("/a/pool", 48, 2 << 20, 4, 64, 1))
    yield writer
    writer.close()


@pytest.mark.parametrize("choice", ["auto", "pool"])
def test_an_engine_joins_the_pool_of_serving(pooled: SegmentWriter, tmp_path: Path, choice: str) -> None:
    member = PoolMembership(choice)  # type: ignore[arg-type]
    engine = member.settings(ENGINE, tmp_path / "pooled")
    assert (engine.kv_pool, engine.kv_memory_mb) == ("/a/pool", 96)
    assert not member.is_lost(tmp_path / "pooled") and member.is_lost(None) and member.is_lost(tmp_path / "another")


def test_every_rank_needs_a_pool_of_its_own(tmp_path: Path) -> None:
    writer = segment(tmp_path / "two", ("/a/pool", 48, 2 << 20, 4, 64, 2))
    with pytest.raises(ConfigError, match="2 tensor-parallel ranks, and the rollout engine on cpu:0 has 1"):
        PoolMembership("auto").settings(ENGINE, tmp_path / "two")
    two = replace(ENGINE, device="cpu:0-1", tensor_parallel=2)
    assert PoolMembership("auto").settings(two, tmp_path / "two").kv_pool == "/a/pool"
    assert PoolMembership("static").settings(ENGINE, tmp_path / "two") == ENGINE
    writer.close()


def test_without_a_pool_the_memory_is_the_engines_own(pooled: SegmentWriter, tmp_path: Path) -> None:
    plain = segment(tmp_path / "plain", ("", 0, 0, 0, 0, 0))
    for member, where in (
        (PoolMembership("static"), "pooled"),
        (PoolMembership("auto"), "plain"),
        (PoolMembership("auto"), "gone"),
    ):
        assert member.settings(ENGINE, tmp_path / where) == ENGINE
        assert not member.is_lost(None)
    assert PoolMembership("auto").settings(ENGINE, None) == ENGINE, "a dedicated worker"
    with pytest.raises(ConfigError, match="no KV pool"):
        PoolMembership("pool").settings(ENGINE, tmp_path / "plain")
    plain.close()


def test_only_an_engine_without_life_that_holds_pages_blocks_serving(pooled: SegmentWriter, tmp_path: Path) -> None:
    member = PoolMembership("pool")
    member.settings(ENGINE, tmp_path / "pooled")
    stopped, late = Status(1, at_s=100.0, pages=8), 100.0 + HAND_OVER_S_MAX
    assert not member.is_blocking(stopped, late + 1), "serving asks for nothing"
    pooled.pages(8, 8, 4)
    assert not member.is_blocking(stopped, late + 1), "since now"
    assert member.is_blocking(stopped, late + 2 + HAND_OVER_S_MAX)
    assert member.serving_pages == 8
    assert not member.is_blocking(Status(1, at_s=late + 2 + HAND_OVER_S_MAX, pages=8), late + 2 + HAND_OVER_S_MAX)
    assert not member.is_blocking(Status(1, at_s=100.0), late + 99), "it holds nothing"
    pooled.pages(12, 12, 0)
    assert not member.is_blocking(stopped, late + 100)
