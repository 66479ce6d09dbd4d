from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from tests.integration import devices

from rose.models.presets import write_preset

PRESET = "qwen3-3m"
StartScripted = Callable[..., devices.Device]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_preset(PRESET, tmp_path_factory.mktemp("models") / PRESET, seed=0)


@pytest.fixture(scope="session")
def device(model_folder: Path) -> Iterator[devices.Device]:
    """One device with the embedded engine, for all tests that do it no harm."""
    found = devices.start(
        ["-m", "rose", "serve", str(model_folder), "--port", "0", "--device", devices.DEVICE], model_folder
    )
    yield found
    devices.end(found)


@pytest.fixture
def client(device: devices.Device) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{device.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def scripted(model_folder: Path) -> Iterator[devices.Device]:
    """One device with the scripted engine and little patience, for tests that leave it whole."""
    found = _start_scripted(model_folder, "front.slow_reader_s=0.5", "front.read_timeout_s=0.5")
    yield found
    devices.end(found)


@pytest.fixture
def start_scripted(model_folder: Path) -> Iterator[StartScripted]:
    """Starts devices with the scripted engine, which a test may harm."""
    started: list[devices.Device] = []

    def start(*overrides: str) -> devices.Device:
        started.append(_start_scripted(model_folder, *overrides))
        return started[-1]

    yield start
    for found in started:
        devices.end(found)


def _start_scripted(model_folder: Path, *overrides: str) -> devices.Device:
    arguments = [
        "-m",
        "tests.integration.scripted_device",
        str(model_folder),
        "front.port=0",
        f"device={devices.DEVICE}",
        *overrides,
    ]
    return devices.start(arguments, model_folder)
