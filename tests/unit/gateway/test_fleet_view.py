"""The rows of the live page, and what a page gets of them."""

from __future__ import annotations

from rose.api.worker_messages import Heartbeat, Join, ServingReport
from rose.config.server_settings import GatewaySettings
from rose.gateway.fleet_view import COLUMNS, REFRESH_S, FleetFeed
from rose.gateway.gateway_core import GatewayCore
from rose.openai.response_writing import event

KILOBYTE = 1000


def fleet(workers: int) -> GatewayCore:
    core = GatewayCore("m", GatewaySettings())
    for number in range(workers):
        join = Join(f"device-{number:04}", "borrowed", "m", "0", 16, 4096, 4096, labels={"rack": f"r{number}"})
        worker = core.join(join, lambda message: None, 0.0)
        core.receive(worker, beat(number), 0.0)
    return core


def beat(number: int, tokens_per_s: float = 12.3456) -> Heartbeat:
    report = ServingReport(100 + number, 0.05, 0.2, 0.012, 0.03, 0.5, 0.05, 0.4321, number % 2, number % 3, 1)
    return Heartbeat(0, 0, 0, 4096, "0", True, tokens_per_s, can_park=True, serving=report)


def test_a_page_gets_every_row_once_and_then_what_changed() -> None:
    core = fleet(3)
    feed = FleetFeed(core, "m")
    first, seen = feed.event(None, 0.0)
    assert first.is_full and first.columns == COLUMNS and len(first.rows) == 3
    row = dict(zip(COLUMNS, (getattr(first.rows[1], name) for name in COLUMNS)))
    assert (row["ttft_p99_s"], row["ttft_budget_s"], row["lent_share"], row["tokens_per_s"]) == (0.2, 0.5, 0.432, 12.3)
    worker = core.pool.get("device-0001")
    assert worker is not None
    core.receive(worker, beat(1, 99.0), 1.0)
    core.remove_worker(core.pool.get("device-0002"), 1.0)  # type: ignore[arg-type]
    unchanged, seen = feed.event(seen, REFRESH_S / 2)
    assert unchanged.rows == [] and unchanged.gone == []  # the rows of a moment ago are good enough
    second, _ = feed.event(seen, 1.0)
    assert [row.name for row in second.rows] == ["device-0001"] and second.gone == ["device-0002"]
    assert second.pool.tokens_per_s == {"dedicated": 0.0, "borrowed": 111.3} and second.pool.staleness == {"0": 2}


def test_the_first_event_of_a_thousand_workers_stays_small() -> None:
    first, _ = FleetFeed(fleet(1000), "m").event(None, 0.0)
    assert len(event(first)) < 250 * KILOBYTE
