"""The keys of a run: a worker's key reads and verifies and can do nothing else; guessable secrets are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.chain_ends import RUN, SECRET, TENSORS, Member, Story

from rose.cli.main import main
from rose.errors import ConfigError
from rose.run.publishing import Publishing
from rose.run.run_settings import WeightsSettings
from rose.weights.keys import check_secret, for_reading, read_key, run_secret, write_key
from rose.weights.manifest import Claim, seal, unseal
from rose.weights.receive import Receiver
from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_server import RelayServer
from rose.weights.writing import ChainWriter

READ_KEY = for_reading(SECRET)


@pytest.mark.parametrize("secret", [b"", b"short", b"a" * 16, b"ab" * 32, b"0123456701234567", b"secretsecretsecret"])
def test_a_secret_that_can_be_guessed_is_refused(secret: bytes) -> None:
    with pytest.raises(ConfigError, match="secret"):
        check_secret(secret)


@pytest.mark.parametrize("secret", [SECRET, b"3f1c9a7702be48d5", bytes(range(16))])
def test_a_secret_of_many_different_characters_is_accepted(secret: bytes) -> None:
    assert check_secret(secret) == secret and write_key(secret).relay != write_key(secret).read.relay


def test_a_read_key_verifies_and_does_not_contain_the_secret() -> None:
    record = seal(SECRET, "run/key", Claim(RUN, 1, "me", 0))
    assert unseal(READ_KEY, "run/key", record, Claim).owner == "me"
    assert read_key(READ_KEY) == read_key(SECRET) and for_reading(READ_KEY) == READ_KEY
    assert SECRET.hex().encode() not in READ_KEY and write_key(SECRET).relay.hex().encode() not in READ_KEY


def test_a_read_key_can_neither_sign_claim_nor_serve() -> None:
    with pytest.raises(ConfigError, match="read key"):
        seal(READ_KEY, "run/key", Claim(RUN, 1, "me", 0))
    with pytest.raises(ConfigError, match="read key"):
        ChainWriter(MemoryRelay(), run=RUN, secret=READ_KEY, tensors=TENSORS)
    with pytest.raises(ConfigError, match="read key"):
        RelayServer(MemoryRelay(), READ_KEY)


@pytest.mark.parametrize("change", [slice(0, -1), slice(0, 20)])
def test_a_damaged_read_key_is_refused(change: slice) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        run_secret(READ_KEY[change])


def test_a_worker_that_holds_only_the_read_key_follows_the_trainer() -> None:
    story = Story(2)
    receiver = Receiver(story.relay, RUN, secret=READ_KEY)
    received = receiver.fetch()
    assert received is not None and received.version == Member(story.relay).sync()


def test_a_receiver_keeps_no_more_than_the_read_key() -> None:
    assert Receiver(MemoryRelay(), RUN, secret=SECRET).reader.secret == READ_KEY


@pytest.mark.parametrize("is_given", [False, True])
def test_workers_of_a_run_get_the_read_key_and_never_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    from types import SimpleNamespace

    for variable in ("ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)
    if is_given:
        (tmp_path / "given").write_bytes(SECRET)
        monkeypatch.setenv("ROSE_RELAY_SECRET_FILE", str(tmp_path / "given"))
    folder = SimpleNamespace(name="it", path=tmp_path, weights=tmp_path / "weights")
    publishing = Publishing(WeightsSettings(), folder)  # type: ignore[arg-type]
    secret = SECRET if is_given else (tmp_path / "weights.secret").read_bytes().strip()
    for name, value in publishing.variables.items():
        monkeypatch.setenv(name, value)
    assert run_secret() == for_reading(secret) and secret.decode() not in str(publishing.variables)


def test_a_run_does_not_start_with_a_read_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from rose.run.publishing import given_secret

    monkeypatch.setenv("ROSE_RELAY_SECRET", READ_KEY.decode())
    with pytest.raises(ConfigError, match="read key"):
        given_secret(WeightsSettings())


def test_the_file_of_the_secret_is_private_and_synced_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    from types import SimpleNamespace

    for variable in ("ROSE_RELAY_SECRET", "ROSE_RELAY_SECRET_FILE"):
        monkeypatch.delenv(variable, raising=False)
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    Publishing(WeightsSettings(), SimpleNamespace(name="it", path=tmp_path, weights=tmp_path))  # type: ignore[arg-type]
    assert calls == ["fsync", "replace", "fsync"]
    assert (tmp_path / "weights.secret").stat().st_mode & 0o777 == 0o600


def test_the_command_prints_the_read_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    assert main(["relay", "key", "--secret-file", str(tmp_path / "secret")]) == 0
    assert capsys.readouterr().out.strip().encode() == READ_KEY
