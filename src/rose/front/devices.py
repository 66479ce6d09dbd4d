"""The registry entry of a device, by which `rose lend` finds it: addresses, and the tokens that it made itself.

A token that came from the environment is not written: who set it has it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rose.bounds import Count, Label, Text
from rose.front.registry import entries, registered, registry_folder
from rose.front.tokens import OWNER_VARIABLE, ROLLOUT_VARIABLE


class DeviceCard(msgspec.Struct, frozen=True):
    """A token is empty if the device has none of that kind, or has it from the environment."""

    process_id: Count
    model: Text
    rollout_model: Text
    url: Text
    rollout_url: Text
    owner_token: Label
    rollout_token: Label


def folder() -> Path:
    return registry_folder("devices")


@contextmanager
def shown(card: DeviceCard) -> Iterator[None]:
    """Keep the entry while the device runs."""
    if OWNER_VARIABLE in os.environ:
        card = msgspec.structs.replace(card, owner_token="")
    if ROLLOUT_VARIABLE in os.environ:
        card = msgspec.structs.replace(card, rollout_token="")
    with registered(folder(), msgspec.json.encode(card)):
        yield


def running() -> list[DeviceCard]:
    """Every lent device of this user on this machine."""
    found = []
    for content in entries(folder()):
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            found.append(msgspec.json.decode(content, type=DeviceCard))
    return found
