"""What an agent beside a `vllm serve` shows its owner, by a seat that has what a real one has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from rose.engines.vllm.desk import Lent, Status
from rose.engines.vllm.starting import RolloutEngine
from rose.engines.vllm.worker import engine_facts
from rose.rollout.vllm_agent import VllmLending
from rose.rollout.vllm_owner import VllmOwner
from rose.weights.metrics import ReceiveMetrics

LENT = Lent(steps=3, tokens=70, seconds=0.25, breaches={"ttft": 2}, doubtful=1, breaker_trips=4)
STATUS = Status(
    7,
    gate_open=True,
    running=2,
    waiting=1,
    kv_blocks_limit=8,
    kv_blocks_used=4,
    generated_tokens=50,
    evictions=5,
    lent=LENT,
)


def seat(status: Status | None) -> Any:
    lending = VllmLending(RolloutEngine(Path("models/rollout")), "http://127.0.0.1:1")
    return SimpleNamespace(
        lending=lending, status=status, facts=engine_facts(status or Status(0)), trouble=None, stopped="", wishes={},
        restarts=6, gave_up=asyncio.get_running_loop().create_future(),
    )  # fmt: skip


def scraped(status: Status | None, lag_versions: int = 0) -> dict[str, float]:
    return asyncio.run(_scraped(status, lag_versions))


async def _scraped(status: Status | None, lag_versions: int) -> dict[str, float]:
    owner = VllmOwner(seat(status), "a-token")
    ReceiveMetrics(owner.metrics).looked(lag_versions, refused_new=0)
    async with TestClient(TestServer(owner.application())) as client:
        async with client.get("/metrics") as answer:
            assert answer.status == 200, "without a token, as at any device"
            lines = (await answer.text()).splitlines()
        async with client.get("/rose/lending") as refused:
            assert refused.status == 401
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def test_the_figures_of_a_lent_device_are_scraped() -> None:
    found = scraped(STATUS, lag_versions=9)
    for name, value in {
        "rose_gate_open": 1,
        "rose_lending": 1,
        "rose_rollout_tokens_total": 70,
        "rose_rollout_steps_total": 3,
        "rose_lent_seconds_total": 0.25,
        "rose_rollout_evictions_total": 5,
        "rose_breaker_trips_total": 4,
        "rose_engine_restarts_total": 6,
        "rose_weights_lag_versions": 9,
    }.items():
        assert found[name] == value, name
    breaches = {kind: found[f'rose_slo_breaches_total{{kind="{kind}"}}'] for kind in ("step", "ttft", "tpot")}
    assert breaches == {"step": 0, "ttft": 2, "tpot": 0}
    assert found['vllm:num_requests_running{model_name="rollout"}'] == 2
    assert found['vllm:generation_tokens_total{model_name="rollout"}'] == 50


@pytest.mark.parametrize(
    "status, is_open",
    [pytest.param(None, 0, id="no engine"), pytest.param(Status(7, why="serving has work"), 0, id="closed")],
)
def test_a_closed_gate_is_seen_with_and_without_an_engine(status: Status | None, is_open: int) -> None:
    found = scraped(status)
    assert found["rose_gate_open"] == is_open
    assert ("rose_rollout_tokens_total" in found) == (status is not None), "nothing is made up without an engine"
