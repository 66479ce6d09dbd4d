"""The gateway's tokens: another for each role, long enough, and written only to private files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.gateway.auth import (
    VARIABLES,
    GatewayEntry,
    Role,
    RoleTokens,
    registered_gateway,
    session_in,
    token_for,
    tokens_from_environment,
)
from rose.openai import service_registry as registry

URL = "http://127.0.0.1:8002"
MADE = RoleTokens("agent" * 5, "worker" * 5, "trainer" * 5, "operator" * 5)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "rose" / "gateways"


def test_equal_tokens_for_two_roles_are_refused_and_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_AGENT_TOKEN", "the-very-same-token")
    monkeypatch.setenv("ROSE_OPERATOR_TOKEN", "the-very-same-token")
    with pytest.raises(ConfigError, match="ROSE_AGENT_TOKEN and ROSE_OPERATOR_TOKEN are the same"):
        tokens_from_environment()


@pytest.mark.parametrize("length, is_refused", [(15, True), (16, False), (256, False), (257, True)])
def test_a_token_has_16_to_256_characters(monkeypatch: pytest.MonkeyPatch, length: int, is_refused: bool) -> None:
    monkeypatch.setenv("ROSE_TRAINER_TOKEN", "x" * length)
    if is_refused:
        with pytest.raises(ConfigError, match="ROSE_TRAINER_TOKEN is not a token: 16 to 256 plain characters"):
            tokens_from_environment()
    else:
        assert tokens_from_environment().trainer == "x" * length


def test_tokens_that_are_made_differ() -> None:
    tokens = tokens_from_environment()
    assert len({tokens.agent, tokens.worker, tokens.trainer, tokens.operator}) == 4


def test_the_file_of_a_gateway_is_for_its_user_only_and_goes_with_it(cache: Path) -> None:
    before = os.umask(0)
    try:
        with registered_gateway(GatewayEntry(os.getpid(), URL, MADE)) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(cache.stat().st_mode) == 0o700
            assert token_for("trainer", URL + "/") == MADE.trainer
            assert token_for("trainer", "http://127.0.0.1:1") is None
    finally:
        os.umask(before)
    assert list(cache.iterdir()) == []


def test_a_token_from_the_environment_is_not_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_AGENT_TOKEN", MADE.agent)
    with registered_gateway(GatewayEntry(os.getpid(), URL, MADE)) as path:
        assert MADE.agent.encode() not in path.read_bytes()
        assert token_for("agent", URL) == MADE.agent, "it is in the environment here too"
        monkeypatch.delenv("ROSE_AGENT_TOKEN")
        assert token_for("agent", URL) is None
        assert token_for("worker", URL) == MADE.worker


REGISTERS = """
import sys, time
from rose.gateway.auth import GatewayEntry, RoleTokens, registered_gateway
with registered_gateway(GatewayEntry(1, sys.argv[1], RoleTokens(*["of-the-killed-one"] * 4))):
    print("registered", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("swept_by", ["a command that looks for a token", "the next gateway"])
def test_the_entry_of_a_killed_gateway_is_removed(cache: Path, swept_by: str) -> None:
    with subprocess.Popen([sys.executable, "-c", REGISTERS, URL], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == "registered\n"
        [entry] = cache.iterdir()
        assert token_for("agent", URL) == "of-the-killed-one"
        killed.kill()
    assert entry.exists()
    if swept_by == "the next gateway":
        with registered_gateway(GatewayEntry(os.getpid(), URL, MADE)) as path:
            assert list(cache.iterdir()) == [path]
    assert token_for("agent", URL) is None
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 10_000, b'{"process_id": 1, "url": 5}', b"x" * (1 << 20)])
def test_an_entry_that_cannot_be_read_is_skipped(cache: Path, content: bytes) -> None:
    with registry.registered(cache, content):
        assert token_for("agent", URL) is None


@pytest.mark.parametrize(
    "key, role, session",
    [
        ("agent" * 5, "agent", ""),
        (f"{'agent' * 5}/s-1", "agent", "s-1"),
        (f"{'agent' * 5}/a/b.secret", "agent", "a/b.secret"),
        (f"{'trainer' * 5}/s", "trainer", "s"),
        ("worker" * 5, "worker", ""),
        (f"{'worker' * 5}/s", "worker", None),
        (f"{'operator' * 5}/s", "operator", None),
        (f"{'agent' * 5}s", "agent", None),
        (f"x{'agent' * 5}/s", "agent", None),
        ("/s", "agent", None),
        ("", "agent", None),
    ],
)
def test_a_key_of_agents_and_trainers_may_name_a_session(key: str, role: Role, session: str | None) -> None:
    found = session_in(key.encode(), MADE.of(role).encode(), role)
    assert found == (session.encode() if session is not None else None)
