"""The program of a rollout engine makes SGLang's server listen on a Unix socket."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from rose.sglang import plugin


def test_the_http_server_gets_the_path_of_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.ROLE_VARIABLE, raising=False)
    from rose.sglang.rollout_server import listen_on

    class Config:
        def __init__(self, app: str, **settings: Any) -> None:
            self.app, self.settings = app, settings

    module = ModuleType("uvicorn")
    module.Config = Config  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "uvicorn", module)
    listen_on("/a/http")
    config = Config("app", host="127.0.0.1")
    assert (config.app, config.settings) == ("app", {"host": "127.0.0.1", "uds": "/a/http"})
