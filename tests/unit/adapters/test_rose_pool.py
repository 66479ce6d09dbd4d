"""The pool of a trainer: where its gateway and relay are, and its token."""

from __future__ import annotations

import pytest
from tests.unit.adapters.trl_world import FakePool

from rose.adapters.rose_pool import TOKEN, RosePool, shortage
from rose.errors import ConfigError


def test_a_folder_is_named_so_that_workers_elsewhere_find_it(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    addresses = {"relay": str(tmp_path / "relay"), "file:/a": "/a", "http://relay:7070": "http://relay:7070"}
    for given, expected in addresses.items():
        assert FakePool(folder, given).relay == expected


def test_a_pool_needs_the_trainers_token(folder, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ConfigError, match="token for trainers") as raised:
        RosePool(folder, gateway="http://nowhere", relay="relay", run="r")
    assert TOKEN in str(raised.value)
    monkeypatch.setenv(TOKEN, "a-token-of-the-environment")
    RosePool(folder, gateway="http://nowhere", relay="relay", run="r")


def test_a_shortage_names_what_each_worker_lacks():
    members = [{"name": "a", "state": "gated", "trouble": ""}, {"name": "b", "state": "open", "trouble": "old weights"}]
    assert shortage({"waiting_turns": 3, "members": members}) == (
        "3 turns wait at the gateway for a is gated; b is open old weights"
    )
    assert "a worker: there is none" in shortage({"waiting_turns": 1, "members": []})
