"""Gateways that ask each other for their loads, and workers that move between them, over real connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout_world import PROMPT, TOKENS, World, eventually, scripted, world

from rose.api.worker_messages import Move
from rose.config.server_settings import ControlSettings, GatewaySettings
from rose.core import shard_balance
from rose.core.shard_placement import shard_of
from rose.errors import ConfigError
from rose.gateway import shard_peers
from rose.gateway.auth import VARIABLES
from rose.gateway.shard_peers import check_shards, exchange_loads
from rose.models.model_folder import ModelFolder
from rose.observe.journal import read

NAMES = [name for name in map(str, range(40)) if shard_of(name, 2) == 0][:2]  # of workers that join shard 0 first
QUICK = {"starving_s": 0.05, "calm_s": 0.05, "hold_s": 0.3, "settle_s": 0.2}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_peers, "EXCHANGE_S", 0.02)
    rules = shard_balance.BalanceRules
    monkeypatch.setattr("rose.gateway.shard_moves.BalanceRules", lambda **changes: rules(**QUICK, **changes))


def tell(folder: ModelFolder, tmp_path: Path, story: Callable[[list[World], str], Awaitable[None]]) -> None:
    async def whole() -> None:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            ports = [one.getsockname()[1], two.getsockname()[1]]
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        async with AsyncExitStack() as stack:
            settings: dict[str, Any] = {"shards": urls, "shard_journal": str(tmp_path / "moves.jsonl")}
            shards = []
            for number, port in enumerate(ports):
                journal = str(tmp_path / f"moves-{number}.jsonl")
                changes = settings | {"shard": number, "port": port, "shard_journal": journal}
                shards.append(await stack.enter_async_context(world(folder, **changes)))
            exchanges = [asyncio.create_task(exchange_loads(shard.gateway, TOKENS.operator)) for shard in shards]
            try:
                await story(shards, ",".join(urls))
            finally:
                for task in exchanges:
                    task.cancel()
                await asyncio.gather(*exchanges, return_exceptions=True)

    asyncio.run(whole())


def test_a_worker_moves_to_a_shard_that_starves_and_plays_there(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(shards: list[World], urls: str) -> None:
        for name in NAMES:
            await shards[0].worker(name, gateway=urls)
        await eventually(lambda: len(shards[0].gateway.core.pool) == 2)
        turn = await shards[1].turn(PROMPT, "s", max_tokens=5)
        assert turn["token_ids"] == scripted(PROMPT, 5)
        await eventually(lambda: [len(shard.gateway.core.pool) for shard in shards] == [1, 1])
        [entry] = list(read(tmp_path / "moves-0.jsonl"))
        assert [(move.target, move.count) for move in entry.decisions] == [(1, 1)]

    tell(folder, tmp_path, story)


def test_a_worker_does_not_follow_an_order_to_an_unknown_shard(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(shards: list[World], urls: str) -> None:
        await shards[0].worker("w")
        worker = shards[0].gateway.core.pool.get("w")
        assert worker is not None
        lease = worker.lease.number
        worker.send(Move(1, "go"))
        await eventually(lambda: (found := shards[0].gateway.core.pool.get("w")) is not None
                         and found.lease.number > lease)  # fmt: skip
        assert len(shards[1].gateway.core.pool) == 0

    tell(folder, tmp_path, story)


def test_the_status_is_for_trainers_and_operators(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(shards: list[World], urls: str) -> None:
        for token, status in ((TOKENS.operator, 200), (TOKENS.trainer, 200), (TOKENS.agent, 403), (TOKENS.worker, 403)):
            assert (await shards[0].ask("GET", "/v1/shard", token=token))[0] == status
        for query in ("at_least=x", "at_least=-1", "wait_s=1000"):
            assert (await shards[0].ask("GET", f"/v1/shard?{query}"))[0] == 400
        assert (await shards[1].ask("GET", "/v1/shard?at_least=1&wait_s=0.05"))[1]["shard"] == 1

    tell(folder, tmp_path, story)


def test_a_gateway_that_calls_itself_otherwise_is_left_out(folder: ModelFolder, tmp_path: Path) -> None:
    async def story(shards: list[World], urls: str) -> None:
        async with shards[0].http as http:
            assert await shard_peers._ask(http, 0, shards[1].url) is None
            assert await shard_peers._ask(http, 1, "http://127.0.0.1:1") is None

    tell(folder, tmp_path, story)


@pytest.mark.parametrize(
    "settings, error",
    [
        (GatewaySettings(), ""),
        (GatewaySettings(shards=("http://a", "http://b"), shard=1), ""),
        (GatewaySettings(shards=("http://a", "http://b"), shard=2), "not a place"),
        (GatewaySettings(shards=("http://a", "http://b")), "not a place"),
        (GatewaySettings(shard=0), "not a place"),
        (GatewaySettings(shards=("a", "b"), shard=1), "not an address"),
        (
            GatewaySettings(shards=("http://a", "http://b"), shard=1, control=ControlSettings(api="vllm")),
            "publish weights on one gateway",
        ),
    ],
)
def test_settings_of_shards_fit_together(
    settings: GatewaySettings, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES.values():
        monkeypatch.setenv(variable, "x" * 20)
    if error:
        with pytest.raises(ConfigError, match=error):
            check_shards(settings)
    else:
        check_shards(settings)


def test_shards_need_common_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.setenv(variable, "x" * 20)
    monkeypatch.delenv("ROSE_WORKER_TOKEN")
    with pytest.raises(ConfigError, match="ROSE_WORKER_TOKEN is not set"):
        check_shards(GatewaySettings(shards=("http://a", "http://b"), shard=1))
