"""The measuring itself: devices that stand by, one per mode, and one piece at a time sent to one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from coserving.calibrate import Trial
from coserving.devices import (
    AMBIGUOUS,
    BREACHES,
    EVICTED_TOKENS,
    LATE_TPOT,
    LATE_TTFT,
    LENDING,
    LENT_TOKENS,
    STEP_SECONDS,
    TRIPS,
    Device,
    Site,
    Terms,
    open_site,
)
from coserving.plan import ALONE, Piece
from coserving.processes import CoreWatch
from coserving.rollouts import Harvest, Order, Rollouts
from coserving.sending import Sent, order_of, send
from coserving.store import Measured
from coserving.traffic import at_rate, cut
from rose.load.traces import Trace

SATURATED_TIMEOUT_S = 300.0
WARM_REQUESTS = 8
WARM_RPS = 8.0  # no faster, or the device would see serving in trouble before the first request that counts
WARM_S = 2.0
START_S = 10.0


class Stage:
    """All devices of a run, started when they are first wanted."""

    def __init__(
        self, terms: Terms, folder: Path, warm: Trace, say: Callable[[str], None], *, shares_alone: bool
    ) -> None:
        self.terms = terms
        self._folder = folder
        self._warm = cut(at_rate(warm, WARM_RPS), 0, min(WARM_REQUESTS, len(warm)))
        self._shares_alone = shares_alone
        self._say = say
        self._sites: dict[str, Site] = {}
        self.start_s = START_S  # how long the newest device took

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def change(self, terms: Terms) -> None:
        """Devices under other terms are stopped."""
        if terms != self.terms:
            self.close()
            self.terms = terms

    def close(self) -> None:
        """Stop every device; the next piece starts its own again."""
        while self._sites:
            self._sites.popitem()[1].close()

    def site(self, mode: str) -> Site:
        """Rollouts alone have the device of `decode`, whose mode does not matter without serving."""
        name = self._name(mode)
        if name not in self._sites:
            begun_s = time.monotonic()
            self._sites[name] = site = open_site(name, self.terms, self._folder)
            self.send(site, self._warm, seed=0)
            self.start_s = time.monotonic() - begun_s
            self._say(f"device for {name} started in {self.start_s:.1f} s")
        return self._sites[name]

    def planned_start_s(self, modes: Iterable[str]) -> float:
        """How long it takes to start the devices of these modes that do not stand by already."""
        return self.start_s * len({self._name(mode) for mode in modes} - self._sites.keys())

    def _name(self, mode: str) -> str:
        if mode == "rollouts_alone":
            return "decode"
        return ALONE[0] if mode in ALONE and self._shares_alone else mode

    def alone(self, trace: Trace, seed: int) -> Trial:
        """For the calibration: requests to a device that lends to nobody."""
        site = self.site(ALONE[0])
        account = _Account(site.serving)
        sent = self.send(site, trace, seed)
        account.close()
        site.wait_until_idle()
        step_s = account.of(STEP_SECONDS)
        return Trial(sent.duration_s, step_s if step_s is not None else account.engine_cpu_s, sent.rows)

    def send(self, site: Site, trace: Trace, seed: int) -> Sent:
        assert site.serving.url is not None
        return send(order_of(trace, site.serving.url, seed, site.cores(), SATURATED_TIMEOUT_S), self._folder)

    def measure(self, piece: Piece, trace: Trace | None, seed: int, rollouts_s: float) -> Measured:
        """One piece. Without a trace only rollouts run, for `rollouts_s`."""
        site = self.site(piece.mode)
        rollouts = self._rollouts(site, seed) if piece.mode not in ALONE else None
        try:
            measured, begin_s = self._served(site, trace, seed) if trace is not None else _waited(site, rollouts_s)
        finally:
            harvest = rollouts.stop() if rollouts is not None else None
        site.wait_until_idle()
        if harvest is not None:
            _add_harvest(measured, harvest, begin_s)
        return measured

    def _rollouts(self, site: Site, seed: int) -> Rollouts:
        assert site.rollout.rollout_url is not None
        rollouts = Rollouts(Order(site.rollout.rollout_url, site.rollout.token, seed), self._folder)
        if not rollouts.wait_until_running():
            self._say("the device has not lent enough for every trajectory to have a turn; going on")
        time.sleep(WARM_S)
        return rollouts

    def _served(self, site: Site, trace: Trace, seed: int) -> tuple[Measured, float]:
        assert site.serving.url is not None
        account = _Account(site.serving)
        sent = send(order_of(trace, site.serving.url, seed, site.cores()), self._folder)
        account.close()
        measured = Measured(
            wall_s=sent.duration_s,
            rows=sent.rows,
            # Two engines on one core: the time of a step is not all its own.
            serving_step_s=account.of(STEP_SECONDS) if site.is_shared else None,
            serving_cpu_s=account.engine_cpu_s,
            breaches=account.of(BREACHES),
            late_requests=account.sum_of(LATE_TTFT, LATE_TPOT),
            ambiguous=account.of(AMBIGUOUS),
            lent_tok_s=account.lent_tok_s,
            breaker_trips=account.of(TRIPS),
            is_lending_share=account.mean(LENDING),
            cores=sent.shares,
        )
        return measured, sent.began_s


class _Account:
    """What a device says of itself, from now on; None for what it does not say."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._before, self._cpu_s, self._begun_s = device.counters(), device.engine_cpu_s(), time.monotonic()
        self._now: dict[str, float] = {}

    def close(self) -> None:
        self._now, self.wall_s = self._device.counters(), time.monotonic() - self._begun_s
        self.engine_cpu_s = self._device.engine_cpu_s() - self._cpu_s

    def of(self, name: str) -> float | None:
        return self._now[name] - self._before.get(name, 0.0) if name in self._now else None

    def sum_of(self, *names: str) -> float | None:
        values = [self.of(name) for name in names]
        return sum(value for value in values if value is not None) if None not in values else None

    def mean(self, name: str) -> float | None:
        """Of a gauge, at the beginning and in the end."""
        return (self._before[name] + self._now[name]) / 2 if name in self._before and name in self._now else None

    @property
    def lent_tok_s(self) -> float | None:
        """Computed for rollouts and not thrown away."""
        lent, evicted = self.of(LENT_TOKENS), self.of(EVICTED_TOKENS)
        return None if lent is None else (lent - (evicted or 0.0)) / self.wall_s


def _waited(site: Site, seconds: float) -> tuple[Measured, float]:
    watch, begin_s = CoreWatch(site.cores()), time.monotonic()
    time.sleep(seconds)
    return Measured(time.monotonic() - begin_s, cores=watch.shares()), begin_s


def _add_harvest(measured: Measured, harvest: Harvest, begin_s: float) -> None:
    measured.rollout_tokens = harvest.between(begin_s, begin_s + measured.wall_s)
    measured.rollout_at_s = [round(at_s - begin_s, 3) for at_s in harvest.at_s]
    measured.rollout_total = harvest.tokens
    measured.rollout_notes = {
        "turns": harvest.turns,
        "aborts": harvest.aborts,
        "refusals": harvest.refusals,
        "thrown_away_tokens": harvest.thrown_away,
        "turn_p50_ms": round(harvest.turn_p50_s * 1000, 2),
        "client_cpu_us_per_turn": round(harvest.cpu_s / harvest.turns * 1e6, 1) if harvest.turns else 0.0,
    }
