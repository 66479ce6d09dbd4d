"""What the live page shows of workers and training: one row per worker, and the figures of the whole pool.

Rows are arrays, and `COLUMNS` names their cells once. They are computed at most once per `REFRESH_S` for all pages
together, and a page gets only the rows that have changed since its last event. A pool of 1,000 workers therefore costs
the gateway's event loop some milliseconds per second, however many pages are open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from rose.api.fleet_orders import OrderRecord
from rose.api.worker_messages import ServingReport
from rose.core.fleet_orders import OrderedState
from rose.gateway.gateway_core import GatewayCore
from rose.gateway.pool import Pool, PoolWorker

REFRESH_S = 0.25
ORDERS_SHOWN = 8
WHY_CHARACTERS = 160
NO_REPORT = ServingReport()


class FleetRow(msgspec.Struct, frozen=True, array_like=True):
    """One worker. Times are in seconds; None is unknown."""

    name: str
    kind: str
    state: str
    why: str
    labels: str
    ordered: OrderedState
    turns: int
    turns_max: int
    turns_ended: int
    tokens_per_s: float
    version: str
    lag: int
    place: str
    kv_use: float | None
    requests: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    ttft_budget_s: float | None
    tpot_budget_s: float | None
    lent_share: float | None
    counted: int
    ambiguous: int
    breaker_trips: int
    is_resting: bool
    sync_s: float | None


COLUMNS = FleetRow.__struct_fields__


class PoolFigures(msgspec.Struct, frozen=True):
    """The pool as a whole. `staleness` counts workers by the number of versions that they are behind."""

    model: str
    version: str | None
    versions: int
    waiting: int
    running: int
    counts: dict[str, int]
    last_batch: int
    complete_groups: int
    trajectories: int
    finished: int
    tokens_per_s: dict[str, float]  # by kind of worker
    staleness: dict[str, int]
    sync_s: float | None  # of the slowest worker, for the version that it runs
    orders: list[OrderRecord]


class FleetEvent(msgspec.Struct, frozen=True):
    """What one page has not seen yet: all rows if `is_full`, else those that changed and the names that are gone."""

    now_s: float
    is_full: bool
    columns: tuple[str, ...]
    rows: list[FleetRow]
    gone: list[str]
    pool: PoolFigures


def state_of(worker: PoolWorker, pool: Pool, now_s: float) -> str:
    """Return in one word whether the worker gets turns, or what keeps them from it."""
    heartbeat, placement = worker.heartbeat, worker.placement
    if placement.is_draining:
        return "draining"
    if not heartbeat.is_offered:
        return "held"
    if placement.order.state != "lending":
        return placement.order.state
    if not worker.provisioning.is_wanted or heartbeat.place == "parked":
        return "parked"
    if not heartbeat.gate_open or now_s < placement.closed_until_s:
        return "closed"
    return "open" if pool.may_run(worker) else "behind"


def row_of(worker: PoolWorker, pool: Pool, now_s: float) -> FleetRow:
    """Return the row of one worker."""
    heartbeat, weights, placement = worker.heartbeat, worker.weights, worker.placement
    report = heartbeat.serving or NO_REPORT
    return FleetRow(
        worker.name,
        worker.kind,
        state_of(worker, pool, now_s),
        (worker.trouble or heartbeat.why)[:WHY_CHARACTERS],
        ", ".join(f"{key}={value}" for key, value in sorted(worker.registration.labels.items())),
        placement.order.state,
        len(placement.attempt_ids),
        worker.turns_max,
        placement.turns_ended,
        round(heartbeat.tokens_per_s, 1),
        weights.version,
        pool.lag(worker),
        heartbeat.place,
        None if heartbeat.kv_use is None else round(heartbeat.kv_use, 3),
        report.requests,
        report.ttft_p50_s,
        report.ttft_p99_s,
        report.tpot_p50_s,
        report.tpot_p99_s,
        report.ttft_budget_s,
        report.tpot_budget_s,
        None if report.lent_share is None else round(report.lent_share, 3),
        report.counted,
        report.ambiguous,
        report.breaker_trips,
        report.is_resting,
        None if weights.sync_s is None else round(weights.sync_s, 3),
    )


class FleetFeed:
    """The rows of one gateway, and what each page has yet to get of them."""

    def __init__(self, core: GatewayCore, model: str) -> None:
        self.pages = 0  # that are open now
        self._core, self._model = core, model
        self._at_s: float | None = None
        self._order_number = 0
        self._rows: dict[str, FleetRow] = {}
        self._figures: PoolFigures

    def event(self, seen: Mapping[str, FleetRow] | None, now_s: float) -> tuple[FleetEvent, dict[str, FleetRow]]:
        """Return the next event of a page that has `seen` these rows, None for none, and what it has seen then."""
        rows, figures = self._refreshed(now_s)
        if seen is None:
            return FleetEvent(now_s, True, COLUMNS, list(rows.values()), [], figures), rows
        changed = [row for name, row in rows.items() if seen.get(name) != row]
        gone = [name for name in seen if name not in rows]
        return FleetEvent(now_s, False, (), changed, gone, figures), rows

    def _refreshed(self, now_s: float) -> tuple[dict[str, FleetRow], PoolFigures]:
        core, number = self._core, self._core.fleet.newest_number
        if self._at_s is None or now_s - self._at_s >= REFRESH_S or number != self._order_number:
            self._at_s, self._order_number = now_s, number
            self._rows = {worker.name: row_of(worker, core.pool, now_s) for worker in core.pool}
            self._figures = self._sum_up()
        return self._rows, self._figures

    def _sum_up(self) -> PoolFigures:
        core, rows = self._core, self._rows.values()
        counts = core.scheduler.counts
        by_kind = {
            kind: sum(row.tokens_per_s for row in rows if row.kind == kind) for kind in ("dedicated", "borrowed")
        }
        return PoolFigures(
            model=self._model,
            version=core.pool.newest_version,
            versions=core.pool.versions,
            waiting=core.scheduler.waiting,
            running=core.scheduler.running,
            counts={name: getattr(counts, name) for name in type(counts).__slots__},
            last_batch=core.trajectories.last_batch,
            complete_groups=core.trajectories.complete_groups,
            trajectories=len(core.trajectories),
            finished=core.trajectories.finished,
            tokens_per_s={kind: round(rate, 1) for kind, rate in by_kind.items()},
            staleness={str(lag): count for lag, count in sorted(Counter(row.lag for row in rows).items())},
            sync_s=max((row.sync_s for row in rows if row.sync_s is not None), default=None),
            orders=core.fleet.newest(ORDERS_SHOWN),
        )
