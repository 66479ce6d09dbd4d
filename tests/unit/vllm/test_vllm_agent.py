"""The engine client of a rollout engine: one per device, restarted, parked, and renewing its grant."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.unit.vllm.test_status_segment import header

from rose.core.lending_state import PAUSED, after_command, with_stop
from rose.device.residency import UNWANTED
from rose.errors import ConfigError, Unavailable
from rose.vllm import vllm_agent
from rose.vllm.control_segment import LendingAccount, Status
from rose.vllm.engine_process import RolloutEngineSettings
from rose.vllm.status_segment import SegmentWriter
from rose.vllm.vllm_agent import VllmEngineClient, VllmLending

LENT = LendingAccount(steps=3, tokens=70, seconds=0.25, breaches={"ttft": 2, "ambiguous": 1}, breaker_trips=4)


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


@pytest.mark.parametrize(
    "shown, shut_s",
    [
        pytest.param([{"steps": 1}, {"steps": 2}, {"steps": 3}], None, id="it steps"),
        pytest.param([{"steps": 1}, {}, {}], 1.0, id="turns wait, and no step is made"),
        pytest.param([{"steps": 1}, {}, {"steps": 2}], None, id="open again"),
        pytest.param([{"steps": 1}, {}, {"gate_open": True, "until_s": 9.0}], None, id="open, and about to step"),
        pytest.param([{"steps": 1}, {}, {"gate_open": True, "until_s": 1.5}], 1.0, id="open until a while ago"),
        pytest.param([{"steps": 1}, {"running": 0}, {}], None, id="nobody waits"),
        pytest.param([{"steps": 1}, {}, {"running": 0}], 1.0, id="all have left a shut gate"),
        pytest.param([{"steps": 1}, {}, {"running": 0, "gate_open": True}], None, id="and would find it open again"),
        pytest.param([{"steps": 1}, {}, {"running": 0, "steps": 2}], None, id="all have left after a step"),
        pytest.param([{"steps": 1}, *[{}] * 5], 4.0, id="it has been silent for a while"),
        pytest.param([{"steps": 1}, *[{}] * 6], None, id="it hangs"),
        pytest.param([{"steps": 1}, *[{}] * 5, {"at_s": 5.0}], 5.0, id="it does not, and waits"),
        pytest.param(
            [{"steps": 1}, {}, {"lent": LendingAccount(resting="three deadlines lost")}], None, id="lending rests"
        ),
        pytest.param([{"steps": 1}, {}, None], None, id="it has died"),
    ],
)
def test_shut_s_is_how_long_serving_has_blocked_admission(
    shown: list[dict[str, Any] | None], shut_s: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at once a second."""

    async def look() -> float | None:
        client = client_of(tmp_path, monkeypatch)
        status, found = Status(7, running=1), None
        for now_s, changes in enumerate(shown):
            status = msgspec.structs.replace(status, **(changes or {}))
            client._engine = None if changes is None else SimpleNamespace(status=lambda status=status: status)
            client._watch_admission(float(now_s))
            found = client.shut_s
        client._locks.close()
        return found

    assert asyncio.run(look()) == shut_s


SERVING_URL = "http://127.0.0.1:1"


def client_of(folder: Path, monkeypatch: pytest.MonkeyPatch, serving_url: str = SERVING_URL) -> VllmEngineClient:
    """Return a client that has no engine yet and locks its devices in this folder."""
    monkeypatch.setattr(vllm_agent, "own_folder", lambda: folder)
    return VllmEngineClient(VllmLending(RolloutEngineSettings(Path("models/rollout")), serving_url))


def with_client(check: Callable[[VllmEngineClient], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client = client_of(folder, monkeypatch)
        check(client)
        client._locks.close()

    asyncio.run(run())


def test_a_dry_run_does_not_count_as_blocked_by_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(client: VllmEngineClient) -> None:
        client._engine = SimpleNamespace(status=lambda: Status(7, running=1))  # type: ignore[assignment]
        for now_s in (0.0, 1.0):
            client._watch_admission(now_s)
        assert client.shut_s == 1.0
        client.desired = after_command(client.desired, "dry_run")
        client._watch_admission(2.0)
        assert client.shut_s is None

    with_client(check, tmp_path, monkeypatch)


class DyingEngine:
    @property
    def unapplied_s(self) -> float:
        raise Unavailable("the rollout engine is gone")


def test_an_engine_that_dies_during_the_check_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(client: VllmEngineClient) -> None:
        client._process, client._engine = SimpleNamespace(is_running=True), DyingEngine()  # type: ignore[assignment]
        assert not client._is_healthy()

    with_client(check, tmp_path, monkeypatch)


def test_an_error_of_a_subscriber_does_not_end_the_renewal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[int]()

    def fail(status: object) -> None:
        tries.append(1)
        raise RuntimeError("no gateway")

    def check(client: VllmEngineClient) -> None:
        client.events.lending.subscribe(fail)
        client._renew_grant()
        assert tries

    with_client(check, tmp_path, monkeypatch)


def test_a_segment_whose_process_id_was_reused_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / f"{os.getpid()}.board", tmp_path / "other.board"
    monkeypatch.setattr(vllm_agent, "find_segment", lambda url, replica: other)

    def check(client: VllmEngineClient) -> None:
        client._segment = path
        for changes, found in (({}, path), ({"started": 1}, other)):
            SegmentWriter(path, header(**changes))
            client._update_segment()
            assert client._segment == found

    with_client(check, tmp_path, monkeypatch)


class Engine:
    """What a client has in place of an engine: it applies every control at once."""

    def __init__(self) -> None:
        self.control: dict[str, Any] = {}

    async def apply_control(self, **changes: Any) -> None:
        self.control |= changes

    def status(self) -> Status:
        return msgspec.structs.replace(STATUS, kv_blocks_limit=8 if self.control.get("kv_bytes") is None else 0)


def test_the_gateway_parks_the_engine_and_calls_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        client = client_of(tmp_path, monkeypatch)
        client._segment, engine, heard = tmp_path / "board", Engine(), list[object]()
        client._engine = engine  # type: ignore[assignment]
        client.events.lending.subscribe(heard.append)
        await client.adopt(client.desired)
        assert place(client) == ("lending", "resident", True)
        await client.set_wanted(False)
        assert place(client) == ("parked", "parked", False)
        assert (engine.control["tokens"], engine.control["kv_bytes"], engine.control["stopped"]) == (0, 0, UNWANTED)
        await client.adopt(
            after_command(client.desired, "limits", memory_share=0.5)
        )  # a limit of the owner's does not call it back
        assert engine.control["kv_bytes"] == 0
        await client.adopt(after_command(client.desired, "limits", memory_share=1.0))
        await client.set_wanted(True)
        assert place(client) == ("lending", "resident", True)
        status = client.lending_status
        assert status is not None and status.activation_s is not None and status.parking_s is not None
        assert len(heard) == 2, "the gateway hears of both at once"
        client.desired = with_stop(client.desired, PAUSED)
        await client.set_wanted(False)
        assert place(client) == ("paused", "parked", False), "the owner's word goes before"
        client._locks.close()

    asyncio.run(story())


def place(client: VllmEngineClient) -> tuple[str, str, bool]:
    status = client.lending_status
    assert status is not None
    return status.state, status.model, client.trouble is None


def test_a_dedicated_worker_has_no_lending_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        client = client_of(tmp_path, monkeypatch, serving_url="")
        assert client.lending_status is None
        client._locks.close()

    asyncio.run(story())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(12, "Cannot allocate memory"), id="no room"),
        pytest.param(subprocess.SubprocessError("Exception occurred in preexec_fn."), id="not its core"),
    ],
)
def test_an_engine_that_cannot_be_started_is_retried_then_given_up(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[int]()

    def no_room(engine: RolloutEngineSettings) -> None:
        tries.append(1)
        raise error

    async def story() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        monkeypatch.setattr(vllm_agent, "EngineProcess", no_room)
        monkeypatch.setattr(vllm_agent, "RENEW_S", 0.001)
        monkeypatch.setattr(vllm_agent, "RESTARTS", replace(vllm_agent.RESTARTS, pause_first_s=0.001))
        client = VllmEngineClient(VllmLending(RolloutEngineSettings(Path("models/rollout"))))
        async with asyncio.timeout(10):
            await client._keep()
        assert str(error) in client.gave_up.result().what
        assert len(tries) == vllm_agent.RESTARTS.deaths_max - 1, "and it was tried again before"
        client._locks.close()

    asyncio.run(story())


def test_an_error_of_the_keeper_gives_the_engine_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def up() -> None:
        return

    def fail() -> bool:
        raise RuntimeError("nobody thought of this")

    async def story() -> None:
        monkeypatch.setattr(vllm_agent, "own_folder", lambda: tmp_path)
        monkeypatch.setattr(vllm_agent, "RENEW_S", 0.001)
        client = VllmEngineClient(VllmLending(RolloutEngineSettings(Path("models/rollout"))))
        monkeypatch.setattr(client, "_start_engine", up)
        monkeypatch.setattr(client, "_is_healthy", fail)
        await client.start()
        async with asyncio.timeout(10):
            why = await client.gave_up
        assert "nobody thought of this" in why.what
        await client.close()

    asyncio.run(story())


def test_lending_counters_continue_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(client: VllmEngineClient) -> None:
        for process_id in (7, 8):
            status = msgspec.structs.replace(STATUS, process_id=process_id)
            engine: Any = SimpleNamespace(status=lambda status=status: status, write_control=lambda **wishes: 0)
            client._engine = engine
            client._renew_grant()
        told = client.lending_status
        assert told is not None
        assert (told.lent_steps, told.lent_s, told.breaches["ttft"], told.evictions) == (6, 0.5, 4, 10)

    with_client(check, tmp_path, monkeypatch)


def test_a_second_agent_for_one_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path))

    async def story() -> None:
        lending = VllmLending(RolloutEngineSettings(tmp_path), "http://127.0.0.1:8000")
        client = VllmEngineClient(lending)
        with pytest.raises(ConfigError, match="another agent"):
            VllmEngineClient(lending)
        await client.close()
        await VllmEngineClient(lending).close()

    asyncio.run(story())


def agent_of(folder: Path, device: str, serving_url: str = "") -> VllmEngineClient:
    return VllmEngineClient(VllmLending(RolloutEngineSettings(folder, device), serving_url))


@pytest.mark.parametrize(
    "first, second, what",
    [
        pytest.param(("cpu:0-1",), ("cpu:1",), "cpu:1", id="one of its cores"),
        pytest.param(("cpu:1",), ("cpu:0-1",), "cpu:1", id="a core of another's"),
        pytest.param(("cuda:0", "http://a:8000"), ("cuda:0",), "cuda:0", id="a GPU beside a server"),
        pytest.param(("cpu:0", "http://a"), ("cpu:1", "http://a:80"), "http://a:80", id="the usual port"),
        pytest.param(("cpu:0", "https://a"), ("cpu:1", "https://a:443"), "https://a:443", id="that of https"),
    ],
)
def test_an_agent_locks_its_cores_gpu_and_server(
    first: tuple[str, ...], second: tuple[str, ...], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path))

    async def story() -> None:
        client = agent_of(tmp_path, *first)
        with pytest.raises(ConfigError, match=f"another agent lends {what} already"):
            agent_of(tmp_path, *second)
        others = [agent_of(tmp_path, device) for device in ("cpu:2", "cuda:1")]
        for one in (client, *others):
            await one.close()
        await agent_of(tmp_path, *second).close()

    asyncio.run(story())


def test_a_refused_agent_holds_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path))

    async def story() -> None:
        agents = [agent_of(tmp_path, "cpu:1")]
        with pytest.raises(ConfigError):
            agent_of(tmp_path, "cpu:0-1")
        agents.append(agent_of(tmp_path, "cpu:0"))
        for client in agents:
            await client.close()

    asyncio.run(story())


def test_a_server_without_a_status_segment_is_not_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_BOARDS", str(tmp_path))

    async def story() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = VllmEngineClient(VllmLending(RolloutEngineSettings(tmp_path), url))
        with pytest.raises(ConfigError, match="publishes no status segment") as refusal:
            await client.start()
        assert "--scheduler-cls" in str(refusal.value)
        assert client.trouble is not None
        await client.close()
        server.close()

    asyncio.run(story())
