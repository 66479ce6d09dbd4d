"""`rose lend vllm`: its options, the operator's commands and the metrics of what is lent."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tests.unit.vllm.test_vllm_agent import STATUS, Engine, client_of

from rose.cli import lend
from rose.core.accountant import KINDS
from rose.core.slo import Budgets
from rose.device.admin_routes import ControlBody
from rose.errors import ConfigError, Unavailable
from rose.vllm import lend_session
from rose.vllm.control_segment import Status
from rose.vllm.engine_process import RolloutEngineSettings, launch_command
from rose.vllm.lend_session import AdminAddress, VllmAdminRoutes
from rose.vllm.vllm_agent import VllmLending
from rose.weights.weight_metrics import ReceiveMetrics


@pytest.fixture
def lending_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmLending]:
    """Return a function from options of `rose lend vllm` to what is lent."""
    lendings = list[VllmLending]()

    async def note(lending: VllmLending, *arguments: Any) -> int:
        lendings.append(lending)
        return 0

    def run(*options: str) -> VllmLending:
        parser = argparse.ArgumentParser()
        lend.configure(parser)
        assert lend.run(parser.parse_args(["vllm", "--rollout-model", str(tmp_path), *options])) == 0
        return lendings[-1]

    monkeypatch.setattr(lend_session, "lend", note)
    return run


def test_further_flags_of_vllm_come_last(lending_of: Callable[..., VllmLending]) -> None:
    lending = lending_of("--vllm-flag=--dtype=bfloat16", "--vllm-flag=--seed=3")
    assert launch_command(lending.engine, Path("folder"))[-2:] == ["--dtype=bfloat16", "--seed=3"]


def test_a_vllm_server_is_lent_beside_decoding_only_with_budgets(lending_of: Callable[..., VllmLending]) -> None:
    assert lending_of().mode == lending_of("--ttft-ms=400").mode == "idle"
    lending = lending_of("--ttft-ms=400", "--tpot-ms=50", "--tpot=every_gap")
    assert (lending.mode, lending.budgets) == ("decode", Budgets(0.4, 0.05, 0.7, 60.0, "every_gap"))
    assert lending.terms(Path("segment")).budgets == lending.budgets
    with pytest.raises(ConfigError, match="not declared"):
        lending_of("--mode=decode", "--tpot-ms=50")


@pytest.fixture
def scrape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, float]]:
    """Return a function from an engine's status to the metrics at `/metrics`."""

    async def scraped(status: Status | None, lag_versions: int) -> dict[str, float]:
        client = client_of(tmp_path, monkeypatch)
        client.restarts = 6
        client._engine = None if status is None else SimpleNamespace(status=lambda: status)  # type: ignore[assignment]
        routes = VllmAdminRoutes(client, "a-token")
        ReceiveMetrics(routes.metrics).looked(lag_versions, refused_new=0)
        async with TestClient(TestServer(routes.application())) as http:
            async with http.get("/metrics") as response:
                assert response.status == 200, "without a token, as at any device"
                lines = (await response.text()).splitlines()
            async with http.get("/rose/lending") as refused:
                assert refused.status == 401
        client._locks.close()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    return lambda status, lag_versions=0: asyncio.run(scraped(status, lag_versions))


def test_metrics_of_a_lent_device_are_scraped(scrape: Callable[..., dict[str, float]]) -> None:
    found = scrape(STATUS, lag_versions=9)
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
    breaches = {kind: found[f'rose_slo_breaches_total{{kind="{kind}"}}'] for kind in KINDS}
    assert breaches == {"step": 0, "ttft": 2, "tpot": 0, "ambiguous": 1}
    assert found['vllm:num_requests_running{model_name="rollout"}'] == 2
    assert found['vllm:generation_tokens_total{model_name="rollout"}'] == 50


@pytest.mark.parametrize(
    "status", [pytest.param(None, id="no engine"), pytest.param(Status(7, why="serving has work"), id="closed")]
)
def test_blocked_admission_is_a_metric_with_and_without_an_engine(
    status: Status | None, scrape: Callable[..., dict[str, float]]
) -> None:
    found = scrape(status)
    assert found["rose_gate_open"] == 0
    assert ("rose_rollout_tokens_total" in found) == (status is not None), "nothing is made up without an engine"


def test_drained_memory_is_not_given_back_by_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        client = client_of(tmp_path, monkeypatch)
        client._segment, engine, routes = tmp_path / "segment", Engine(), VllmAdminRoutes(client, "a-token")
        client._engine = engine  # type: ignore[assignment]
        for action in ("drain", "limits", "pause", "limits"):
            status = await routes.run_command(action, ControlBody(memory_share=0.5))
            assert (engine.control["kv_bytes"], status.memory_share) == (0, 1.0 if action == "drain" else 0.5)
        await routes.run_command("resume", ControlBody())
        assert engine.control["kv_bytes"] == client.lending.engine.kv_memory_mb << 19
        client._locks.close()

    asyncio.run(check())


def test_remove_reports_that_vllm_keeps_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        client = client_of(tmp_path, monkeypatch)
        client._segment, client._engine = tmp_path / "segment", Engine()  # type: ignore[assignment]
        status = await VllmAdminRoutes(client, "a-token").run_command("remove", ControlBody())
        assert status.state == "drained" and "the engine keeps the weights" in status.why
        client._locks.close()

    asyncio.run(check())


def test_commands_over_http_answer_with_the_status_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        client = client_of(tmp_path, monkeypatch)
        client._segment, client._engine = tmp_path / "segment", Engine()  # type: ignore[assignment]
        headers = {"Authorization": "Bearer a-token"}
        application = VllmAdminRoutes(client, "a-token").application()
        async with TestClient(TestServer(application), headers=headers) as http:
            async with http.get("/rose/lending") as response:
                assert (await response.json())["state"] == "lending"
            async with http.post("/rose/lending/pause") as response:
                assert (await response.json())["state"] == "paused"
            async with http.post("/rose/lending/limits", json={"memory_share": 7}) as response:
                assert response.status == 400
            async with http.post("/rose/lending/nonsense") as response:
                assert response.status == 404 and "there is no action `nonsense`" in await response.text()
        client._locks.close()

    asyncio.run(check())


class Client:
    """In place of the engine client: gives up as soon as it has started, or does not start at all."""

    def __init__(self, lending: VllmLending) -> None:
        self.lending, self.is_closed = lending, False
        self.gave_up: asyncio.Future[Unavailable] = asyncio.get_running_loop().create_future()
        CLIENTS.append(self)

    async def start(self) -> None:
        if self.lending.engine.model.name == "broken":
            raise Unavailable("no room")
        self.gave_up.set_result(Unavailable("it died three times"))

    async def close(self) -> None:
        self.is_closed = True


CLIENTS = list[Client]()


@pytest.mark.parametrize("name, reason", [("model", "it died three times"), ("broken", "no room")])
def test_the_session_ends_with_the_reason_of_its_engine(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Routes(VllmAdminRoutes):
        def __init__(self, client: Any, token: str, metrics_tokens: tuple[str, ...]) -> None:
            self._client, self._token = client, token

    CLIENTS.clear()
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setattr(lend_session, "VllmEngineClient", Client)
    monkeypatch.setattr(lend_session, "VllmAdminRoutes", Routes)
    monkeypatch.setattr(lend_session, "registered_device", lambda entry: nullcontext())
    lending = VllmLending(RolloutEngineSettings(tmp_path / name, f"cpu:{min(lend_session.USABLE)}"))
    with pytest.raises(Unavailable, match=reason):
        asyncio.run(lend_session.lend(lending))
    assert [client.is_closed for client in CLIENTS] == [True]


def test_a_worker_without_its_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend_session, "token_for", lambda role, gateway: None)
    lending = VllmLending(RolloutEngineSettings(tmp_path))
    with pytest.raises(ConfigError, match="worker token"):
        lend_session._agent_settings(lending, "http://gateway", "name")


@pytest.mark.parametrize(
    "key, status", [("", 401), ("a-wrong-token-x", 401), ("scraper-token-16", 200), ("owner-token-1234", 200)]
)
def test_metrics_that_other_machines_reach_need_a_token(
    key: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_METRICS_TOKEN", "scraper-token-16")
    monkeypatch.setenv("ROSE_OWNER_TOKEN", "owner-token-1234")
    admin = AdminAddress("0.0.0.0")
    admin.check()
    assert AdminAddress().metrics_tokens("owner-token-1234") == () and admin.url(80) == "http://127.0.0.1:80"

    async def scrape() -> tuple[int, int]:
        client = client_of(tmp_path, monkeypatch)
        routes = VllmAdminRoutes(client, "owner-token-1234", admin.metrics_tokens("owner-token-1234"))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with TestClient(TestServer(routes.application())) as http:
            async with (
                http.get("/metrics", headers=headers) as metrics,
                http.get("/rose/lending", headers=headers) as own,
            ):
                found = metrics.status, own.status
        client._locks.close()
        return found

    metrics, own = asyncio.run(scrape())
    assert metrics == status
    assert (own == 401) == (key != "owner-token-1234")  # a scraper's token opens nothing else


def test_controls_for_other_machines_need_a_token_that_these_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_OWNER_TOKEN", raising=False)
    AdminAddress("::1").check()
    with pytest.raises(ConfigError, match="ROSE_OWNER_TOKEN is not set"):
        AdminAddress("10.0.0.1").check()
    monkeypatch.setenv("ROSE_METRICS_TOKEN", "owner-token-1234")
    with pytest.raises(ConfigError, match="the same token"):
        AdminAddress("10.0.0.1").metrics_tokens("owner-token-1234")
