"""The plugin does nothing without a role, and refuses what it was not written for."""

from __future__ import annotations

import pytest
from tests.unit import sglang_stubs

from rose.errors import ConfigError
from rose.sglang import plugin


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", [])


def test_without_a_role_sglang_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.ROLE_VARIABLE, raising=False)
    plugin.register()
    assert plugin._registered == []


@pytest.mark.parametrize("role, target", [("serving", "process_batch_result"), ("rollout", "Scheduler")])
def test_a_role_registers_its_hooks_once(role: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = sglang_stubs.install(monkeypatch)
    monkeypatch.setenv(plugin.ROLE_VARIABLE, role)
    plugin.register()
    hooks = dict(modules.registry.hooks)
    assert any(name.endswith(target) for name in hooks)
    modules.registry.hooks.clear()
    plugin.register()
    assert modules.registry.hooks == {}


def test_an_unknown_role_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.ROLE_VARIABLE, "server")
    with pytest.raises(ConfigError, match="is no role"):
        plugin.register()


def test_another_version_of_sglang_is_refused() -> None:
    plugin.check_version("0.5.23")
    with pytest.raises(ConfigError, match=r"0\.5\.24 is installed") as caught:
        plugin.check_version("0.5.24")
    assert "sglang==0.5.23" in str(caught.value.hint)
