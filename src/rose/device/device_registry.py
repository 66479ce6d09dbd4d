"""The registry entry of a device, by which `rose lend` finds it: addresses, and the tokens that it made itself.

A token that came from the environment is not written: the operator who set it has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rose.bounds import Count, Label, Text
from rose.openai.access import OWNER_VARIABLE, ROLLOUT_VARIABLE
from rose.openai.service_registry import entries, registered, registry_folder


class DeviceEntry(msgspec.Struct, frozen=True):
    """One lent device. A token is empty if the device has none of that kind, or has it from the environment."""

    process_id: Count
    model: Text
    rollout_model: Text
    url: Text
    rollout_url: Text
    owner_token: Label
    rollout_token: Label


def devices_folder() -> Path:
    return registry_folder("devices")


@contextmanager
def registered_device(entry: DeviceEntry) -> Iterator[None]:
    """Keep the entry while the device runs."""
    if OWNER_VARIABLE in os.environ:
        entry = msgspec.structs.replace(entry, owner_token="")
    if ROLLOUT_VARIABLE in os.environ:
        entry = msgspec.structs.replace(entry, rollout_token="")
    with registered(devices_folder(), msgspec.json.encode(entry)):
        yield


def running_devices() -> list[DeviceEntry]:
    """Return every lent device of this user on this machine."""
    devices = []
    for content in entries(devices_folder()):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            devices.append(msgspec.json.decode(content, type=DeviceEntry))
    return devices
