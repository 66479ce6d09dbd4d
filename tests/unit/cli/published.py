"""Versions of a run in a relay that a publisher filled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.contract.relays import SECRET

from rose.models.tensors import to_bf16
from rose.weights.publish import Publisher
from rose.weights.relay.filesystem import FilesystemRelay

RUN = "night-1"


def weights_at(version: int) -> dict[str, np.ndarray]:
    """What a version is, whoever publishes it."""
    random_numbers = np.random.default_rng(0)
    weights = {
        "a.weight": random_numbers.standard_normal((300, 70)).astype(np.float32),
        "b.bias": np.ones(9, np.float32),
    }
    weights["a.weight"][version % 300] += np.float32(0.01 * version)
    weights["b.bias"] *= np.float32(version)
    return weights


def bits_at(version: int) -> dict[str, np.ndarray]:
    return {name: to_bf16(array) for name, array in weights_at(version).items()}


def fill_relay(folder: Path) -> tuple[FilesystemRelay, list[str]]:
    """Publish versions 1 to 4 of a run; return the relay and the options that name it to a command."""
    (folder / "secret").write_bytes(SECRET + b"\n")
    relay = FilesystemRelay(folder / "relay", durable=False)
    state = weights_at(1)
    with Publisher(state, relay, run=RUN, secret=SECRET, chunk_elements_max=5000) as publisher:
        for version in range(1, 5):
            for name, array in weights_at(version).items():
                state[name][...] = array
            publisher.publish(version).result()
        publisher.wait()
    where = ["--relay", str(folder / "relay"), "--run", RUN, "--secret-file", str(folder / "secret")]
    return relay, where
