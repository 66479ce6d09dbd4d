"""Checks that protect tokens, weights and answers, each tested alone: `make mutants` takes them out one by one."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.test_rollout_scheduler import World, piece

from rose.coserve import door
from rose.coserve.door import Door, address_of, open_door
from rose.coserve.messages import Fault
from rose.front import devices
from rose.front.devices import DeviceCard
from rose.launch.publishing import SECRET_NAME, Publishing
from rose.launch.settings import WeightsSettings
from rose.rollout import roles
from rose.rollout.ledger_file import LedgerFile
from rose.rollout.messages import Refused
from rose.rollout.roles import GatewayCard, Tokens
from rose.weights.relay import wire
from rose.weights.relay.base import KeyExists
from rose.weights.relay.filesystem import FilesystemRelay

SECRET = b"a-secret-of-both-sides"
PRIVATE = 0o600


# The relay's messages


@pytest.fixture
def ends() -> Iterator[tuple[wire.Connection, wire.Connection, socket.socket]]:
    """A client and a server that know each other by a session key, and the client's socket."""
    left, right = socket.socketpair()
    for end in (left, right):
        end.settimeout(5)
    client = wire.Connection(left, SECRET, is_server=False)
    yield client, wire.Connection(right, SECRET, is_server=True), left
    left.close()
    right.close()


def sent_by(client: wire.Connection, monkeypatch: pytest.MonkeyPatch, message: Any) -> bytes:
    """Return the bytes of a message instead of sending it."""
    kept = bytearray()
    with monkeypatch.context() as patched:
        patched.setattr(client, "send_bytes", kept.extend)
        client.send(message)
    return bytes(kept)


def test_a_relay_message_arrives(ends: Any) -> None:
    client, server, _ = ends
    client.send(wire.Delete("a/b"))
    assert server.receive_request() == wire.Delete("a/b")


def test_a_relay_message_that_was_changed_on_its_way_is_refused(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server, plain = ends
    data = bytearray(sent_by(client, monkeypatch, wire.Delete("a/b")))
    data[-1] ^= 1
    plain.sendall(data)
    with pytest.raises(wire.Disconnected):
        server.receive_request()


def test_a_relay_message_that_is_sent_twice_is_refused(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server, plain = ends
    data = sent_by(client, monkeypatch, wire.Delete("a/b"))
    plain.sendall(data + data)
    assert server.receive_request() == wire.Delete("a/b")
    with pytest.raises(wire.Disconnected):
        server.receive_request()


# The relay's values


def test_the_second_of_two_writers_of_one_key_is_refused(tmp_path: Path) -> None:
    relay = FilesystemRelay(tmp_path)

    def overtaken() -> Iterator[bytes]:
        relay.put_new("a", [b"first"])
        yield b"second"

    with pytest.raises(KeyExists):
        relay.put_new("a", overtaken())
    assert bytes(relay.get("a")) == b"first"


def test_a_relay_that_is_durable_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    FilesystemRelay(tmp_path, durable=True).put_new("a", [b"value"])
    assert False in synced and True in synced, "the value, and the folder that names it"


# Another worker's attempt


def test_what_a_worker_says_of_another_workers_attempt_is_not_heard() -> None:
    world = World()
    owner = world.join("a")
    reader = world.submit("t")
    [turn] = world.turns("a")
    other = world.join("b")
    world.says(other, piece(turn.ticket, 7, end="stop"))
    world.scheduler.heard_refused(other, Refused(turn.ticket, Fault("Unavailable", "x")), world.now_s)
    assert reader.token_ids == [] and turn.ticket in owner.tickets
    world.says(owner, piece(turn.ticket, 9, end="stop"))
    assert reader.token_ids == [9] and reader.ends == ["stop"]


# The listener for rollouts


@pytest.mark.parametrize("uid, is_accepted", [(os.getuid(), True), (os.getuid() + 1, False)])
def test_the_listener_for_rollouts_accepts_only_its_own_user(
    monkeypatch: pytest.MonkeyPatch, uid: int, is_accepted: bool
) -> None:
    monkeypatch.setattr(door, "_uid_of", lambda connection: uid)
    with open_door() as listener, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        client.connect("\0" + address_of(listener))
        accepted = Door(listener).accept()
        assert (accepted is not None) == is_accepted
        if not is_accepted:
            assert client.recv(1) == b"", "the connection was closed"


def test_the_user_of_a_connection_is_the_one_that_the_kernel_knows() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert door._uid_of(left) == os.getuid()


# Files


@pytest.fixture(autouse=True)
def no_mask() -> Iterator[None]:
    """Let modes be what the code says, not what the user's mask leaves of them."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_its_user_may_read_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    file = LedgerFile(path, "m")
    file.note("INSERT OR REPLACE INTO meta VALUES (?, ?)", "x", 1)
    file.commit()
    modes = {found.name: mode_of(found) for found in tmp_path.iterdir()}
    file.close()
    assert len(modes) >= 3 and set(modes.values()) == {PRIVATE}, modes


def test_only_its_user_may_read_the_tokens_of_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with roles.shown(GatewayCard(os.getpid(), "http://x", Tokens("a", "b", "c", "d"))) as path:
        assert mode_of(path) == PRIVATE and mode_of(path.parent) == 0o700


def test_only_its_user_may_read_the_tokens_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with devices.shown(DeviceCard(os.getpid(), "m", "r", "http://x", "http://y", "owner", "rollout")):
        [path] = devices.folder().glob("*.json")
        assert mode_of(path) == PRIVATE and mode_of(path.parent) == 0o700


def test_only_its_user_may_read_the_secret_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    from rose.launch.folder import RunFolder

    folder: Any = SimpleNamespace(path=tmp_path, name="run", weights=tmp_path / "weights")
    folder.write = lambda name, text, **known: RunFolder.write(folder, name, text, **known)
    Publishing(WeightsSettings(), folder)
    assert mode_of(tmp_path / SECRET_NAME) == PRIVATE
