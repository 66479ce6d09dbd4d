"""A relay server before a relay in memory, and a client of it."""

from __future__ import annotations

import pytest
from tests.contract.relays import SECRET

from rose.weights.relay.memory_relay import MemoryRelay
from rose.weights.relay.relay_client import HttpRelay
from rose.weights.relay.relay_server import RelayServer


@pytest.fixture
def inner():
    return MemoryRelay()


@pytest.fixture
def served(inner):
    with RelayServer(inner, SECRET, silence_s=5) as running:
        yield running


@pytest.fixture
def relay(served):
    client = HttpRelay(served.address, SECRET)
    yield client
    client.close()
