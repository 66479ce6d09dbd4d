"""The front process of a device: what keeps it from starting, and what it says when it is ready."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rose.config.server_settings import DeviceSettings, FrontSettings
from rose.device import device_service
from rose.device.device_service import serve
from rose.errors import ConfigError

CORE = min(os.sched_getaffinity(0))


def test_a_device_without_a_model_is_refused_and_leaves_no_affinity() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="nothing to serve"):
        asyncio.run(serve(None, DeviceSettings(device=f"cpu:{CORE}")))
    assert os.sched_getaffinity(0) == before


def test_a_port_in_use_is_reported_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        front = FrontSettings(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="port"):
            asyncio.run(serve(tmp_path / "no such folder", DeviceSettings(device=f"cpu:{CORE}", front=front)))


@pytest.mark.parametrize(
    ("token", "api_key", "expected"),
    [
        (None, None, "curl http://127.0.0.1:"),
        (None, "a key", "Authorization: Bearer KEY"),
        ("a token", None, "rose lend token"),
    ],
)
def test_the_welcome_says_how_to_send_the_first_request(token: str | None, api_key: str | None, expected: str) -> None:
    context: Any = SimpleNamespace(model_name="m", token=token, api_key=api_key, settings=FrontSettings())
    lines: list[str] = []
    with socket.create_server(("0.0.0.0", 0)) as listener:
        device_service._welcome(context, cast(Any, listener), lines.append)
        assert lines[0] == f"m is ready at http://127.0.0.1:{listener.getsockname()[1]}/v1"
    assert expected in "\n".join(lines)
