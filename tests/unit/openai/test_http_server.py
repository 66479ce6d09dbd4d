"""The port of a server, its limits and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
from pathlib import Path

import pytest
from tests.unit.front_world import FrontWorld, run_with_server

from rose.config.server_settings import FrontSettings
from rose.errors import ConfigError
from rose.models.model_folder import ModelFolder
from rose.openai import http_server
from rose.openai.http_server import InFlight, Signals, drain, is_loopback, take_port


def test_fewer_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    limits = {"now": (64, 300)}
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(http_server.resource, "setrlimit", lambda kind, found: limits.update(now=found))
    assert http_server.connections_limit(100, said.append) == 100 and not said
    assert limits["now"] == (300, 300), "the soft limit is raised"
    assert http_server.connections_limit(1024, said.append) == 300 - http_server.OTHER_DESCRIPTORS
    assert "1024" in said[0] and "ulimit -n" in said[0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return str(certificate), str(key)


def test_a_server_with_a_certificate_speaks_tls(folder: ModelFolder, certificate: tuple[str, str]) -> None:
    async def story(found: FrontWorld) -> None:
        context = ssl.create_default_context(cafile=certificate[0])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", found.port, ssl=context, server_hostname="localhost"
        )
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in await reader.readline()
        writer.close()

    run_with_server(folder, story, FrontSettings(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]))


@pytest.mark.parametrize("settings", [{"ssl_keyfile": "key"}, {"ssl_certfile": "nowhere.pem"}])
def test_a_certificate_that_cannot_be_used_is_said(settings: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        http_server.tls_context(FrontSettings(**settings))


def test_a_port_that_cannot_be_taken_says_what_to_do() -> None:
    with take_port(FrontSettings(port=0)) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="is in use") as refused:
            take_port(FrontSettings(port=listener.getsockname()[1]))
        assert "--port 0" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="not an address of this machine"):
        take_port(FrontSettings(host="192.0.2.1", port=0))
    with pytest.raises(ConfigError, match="is not an address"):
        take_port(FrontSettings(host="no such host", port=0))


@pytest.mark.parametrize(
    "host, expected", [("localhost", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("x", False)]
)
def test_which_addresses_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_second_signal_ends_the_wait_for_running_requests() -> None:
    async def story() -> list[str]:
        signals, in_flight, lines = Signals(), InFlight(), list[str]()
        in_flight.count = 1
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.first
        draining = asyncio.create_task(drain(in_flight, 60.0, signals, lines.append))
        await asyncio.sleep(0.06)
        assert in_flight.draining and not draining.done() and not signals.second.done()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await draining
        return lines

    assert asyncio.run(story()) == ["stopping: 1 requests have 60 s to end; stop again to end them now"]


def test_a_signal_interrupts_a_slow_start() -> None:
    async def story() -> None:
        signals = Signals()
        asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGINT)
        await signals.interrupts(asyncio.sleep(60))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(story())
