"""A relay by its address, and what is told when an address or an extra is missing."""

from __future__ import annotations

import sys

import pytest

from rose.errors import ConfigError, Unavailable
from rose.weights.relay.filesystem import FilesystemRelay
from rose.weights.relay.mooncake import MooncakeCluster, MooncakeRelay
from rose.weights.relay.opening import RelayAccess, open_relay
from rose.weights.relay.relay_client import HttpRelay

SECRET = b"a secret of the tests, long enough"


@pytest.mark.parametrize("form", ["{}", "file:{}"])
def test_a_folder(form, tmp_path):
    relay = open_relay(form.format(tmp_path / "relay"))
    assert isinstance(relay, FilesystemRelay) and relay.folder == tmp_path / "relay"


@pytest.mark.parametrize("scheme", ["http", "https", "tcp", "tcps"])
def test_a_server_and_its_secret(scheme):
    relay = open_relay(f"{scheme}://relay.example:7070/", RelayAccess(secret=SECRET))
    assert isinstance(relay, HttpRelay) and relay.address == "relay.example:7070"
    assert (relay._tls is not None) == scheme.endswith("s")
    with pytest.raises(ConfigError, match="secret"):
        open_relay(f"{scheme}://relay.example:7070")


def test_a_server_without_a_port():
    with pytest.raises(ConfigError, match="not an address"):
        open_relay("http://relay.example", RelayAccess(secret=SECRET))


@pytest.mark.parametrize("address", ["tcp:relay.example:1", "http:relay.example:1", "ftp://x/y"])
def test_an_address_that_is_none(address):
    with pytest.raises(ConfigError, match="not the address of a relay"):
        open_relay(address, RelayAccess(secret=SECRET))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be used"):
        open_relay(str(tmp_path / "file" / "relay"))


def test_what_is_missing_for_object_stores_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"rose-rl\[object\]"):
        open_relay("s3://bucket/folder")


def test_mooncake_beyond_this_machine_needs_a_trusted_network():
    with pytest.raises(ConfigError, match="trusted_network"):
        open_relay("mooncake://192.0.2.1:50051")
    assert isinstance(open_relay("mooncake://192.0.2.1:50051", RelayAccess(trusted_network=True)), MooncakeRelay)
    with pytest.raises(ConfigError, match="trusted_network"):
        MooncakeCluster(host="0.0.0.0")


def test_a_mooncake_master_that_is_not_there_is_told_at_once():
    relay = open_relay("mooncake://127.0.0.1:1/2")
    with pytest.raises(Unavailable, match="no Mooncake master"):
        relay.list()
    relay.close()


def test_a_holder_needs_room():
    with pytest.raises(ConfigError, match="holder"):
        MooncakeCluster(holders=0)
