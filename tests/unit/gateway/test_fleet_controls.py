"""Orders kept by the gateway: their history, and what a ledger gives back."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose.api.fleet_orders import HISTORY_MAX, OrderBody
from rose.api.worker_messages import Join, ToAgent
from rose.config.server_settings import GatewaySettings
from rose.errors import ConfigError
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.ledger import Ledger


def core_of(path: Path) -> GatewayCore:
    return GatewayCore("m", GatewaySettings(), Ledger(path, "m"))


def order(core: GatewayCore, body: OrderBody) -> int:
    record, _, _ = core.fleet.apply(body, "2026-11-19T12:00:00+00:00", 0.0)
    return record.matched


def test_orders_and_their_history_survive_a_restart(path: Path) -> None:
    core = core_of(path)
    order(core, OrderBody(action="limits", labels={"b": "2", "a": "1"}, turns_max=3))
    for number in range(HISTORY_MAX + 5):
        order(core, OrderBody(action="pause", workers=[f"w{number}"]))
    before = core.fleet.stored
    core.ledger.commit()
    core.ledger.close()
    again = core_of(path)
    assert again.fleet.stored == before and len(before.history) == HISTORY_MAX
    sent: list[ToAgent] = []
    worker = again.join(Join("w7", "dedicated", "m", "0", 8, 64, 64, labels={"a": "1", "b": "2"}), sent.append, 0.0)
    assert (worker.placement.order.state, worker.turns_max) == ("paused", 3)
    again.ledger.close()


def test_damaged_orders_are_refused_at_the_start(path: Path) -> None:
    core = core_of(path)
    core.ledger.set_orders(b"\xc1 not orders")
    core.ledger.commit()
    core.ledger.close()
    with pytest.raises(ConfigError, match="orders in the ledger are damaged"):
        core_of(path)


def test_an_order_matches_workers_by_all_their_labels() -> None:
    core = GatewayCore("m", GatewaySettings())
    for number in range(4):
        labels = {"rack": f"r{number % 2}", "team": "x" if number < 3 else "y"}
        core.join(Join(f"w{number}", "dedicated", "m", "0", 8, 64, 64, labels=labels), lambda message: None, 0.0)
    assert order(core, OrderBody(action="pause", labels={"rack": "r1"})) == 2
    assert order(core, OrderBody(action="drain", labels={"rack": "r1", "team": "x"})) == 1
    assert [worker.placement.order.state for worker in core.pool] == ["lending", "drained", "lending", "paused"]
    assert order(core, OrderBody(action="resume", all=True)) == 4
    assert {worker.placement.order.state for worker in core.pool} == {"lending"}
