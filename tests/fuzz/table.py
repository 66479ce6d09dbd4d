"""All listeners by name."""

from __future__ import annotations

from tests.fuzz.http_listeners import HTTP_LISTENERS
from tests.fuzz.relay_listener import RELAY
from tests.fuzz.run import Listener
from tests.fuzz.worker_listener import WORKERS

LISTENERS: dict[str, Listener] = {listener.name: listener for listener in (*HTTP_LISTENERS, WORKERS, RELAY)}
