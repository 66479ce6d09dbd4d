"""The process that publishes folders: when it is refused, its environment, and the order of its work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rose.config.server_settings import ControlSettings
from rose.errors import ConfigError, QueueFull, Unavailable
from rose.gateway.publisher_process import ORDERS_MAX, publisher_process
from rose.models.model_folder import ModelFolder
from rose.weights.folder_publisher import PublishOrder
from rose.weights.keys import SECRET

SECRET_TEXT = "a-secret-of-these-tests-and-no-other"


@pytest.mark.parametrize(
    "control, secret, shown",
    [
        (ControlSettings(folder="."), SECRET_TEXT, "--door vllm"),
        (ControlSettings("vllm", "."), SECRET_TEXT, "--door-relay"),
        (ControlSettings("vllm", "missing", "relay"), SECRET_TEXT, "not a folder"),
        (ControlSettings("vllm", ".", "relay"), "", SECRET),
        (ControlSettings("vllm", ".", "relay"), "short", "at least"),
        (ControlSettings("vllm", ".", "relay", "x" * 101), SECRET_TEXT, "control.run"),
        (ControlSettings("vllm", ".", "ftp://x"), SECRET_TEXT, "address of a relay"),
    ],
)
def test_settings_that_could_not_publish_are_refused(
    control: ControlSettings, secret: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, secret)
    with pytest.raises(ConfigError, match=shown):
        publisher_process(tmp_path, "m", control)


def test_orders_wait_for_each_other_and_not_too_many(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, SECRET_TEXT)
    control = ControlSettings("vllm", str(tmp_path), str(tmp_path / "relay"))

    async def story() -> None:
        publisher = publisher_process(folder.path, "m", control)
        assert publisher is not None
        order: list[int] = []

        async def caller(number: int) -> None:
            async with publisher.turn():
                order.append(number)
                await asyncio.sleep(0)

        async with publisher.turn():
            callers = [asyncio.create_task(caller(number)) for number in range(ORDERS_MAX - 1)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                async with publisher.turn():
                    pass
        await asyncio.gather(*callers)
        assert order == list(range(ORDERS_MAX - 1))
        with pytest.raises(Unavailable, match="cannot be read"):
            await publisher.publish(PublishOrder(str(tmp_path / "missing"), 1))
        await publisher.close()

    asyncio.run(story())


def test_the_process_gets_the_secret_of_the_run_and_no_token(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, SECRET_TEXT)
    monkeypatch.setenv("ROSE_TRAINER_TOKEN", "a-trainers-token")
    control = ControlSettings("vllm", str(tmp_path), str(tmp_path / "relay"))

    async def story() -> bytes:
        publisher = publisher_process(folder.path, "m", control)
        assert publisher is not None
        with pytest.raises(Unavailable, match="cannot be read"):  # it is running now
            await publisher.publish(PublishOrder(str(tmp_path / "missing"), 1))
        assert publisher._process is not None
        variables = Path(f"/proc/{publisher._process.pid}/environ").read_bytes()
        words = Path(f"/proc/{publisher._process.pid}/cmdline").read_bytes()
        await publisher.close()
        assert SECRET_TEXT.encode() not in words
        return variables

    variables = asyncio.run(story())
    assert SECRET_TEXT.encode() in variables and b"a-trainers-token" not in variables
