"""The forecast of one lent device from its step profiles: what rollouts get, and the latencies of serving.

It runs `rose.sim.simulated_device`, the engines and the step arbiter of a live device in virtual time, on profiles that
were recorded beside a live one. Rollouts are its closed loop of trajectories. HTTP is not simulated, nor a shortage of
KV memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.core.admission import Mode
from rose.core.slo import Budgets
from rose.engines.base import Request, Sampling
from rose.engines.profiles import load_profile
from rose.errors import ConfigError
from rose.sim.shapes import Arrival
from rose.sim.simulated_device import Device, DeviceReport, DeviceWorld

CONTEXT_TOKENS_MIN = 512  # ten turns of a trajectory


@dataclass(frozen=True, slots=True)
class ListedTraffic:
    """Requests at given times, each a tenant of its own, so that none finds another's prefix."""

    requests: tuple[Arrival, ...]

    def arrivals(self, seed: int, until_s: float) -> list[tuple[float, Request]]:
        del seed  # the requests are given
        return [(one.at_s, _request(n, one)) for n, one in enumerate(self.requests) if one.at_s <= until_s]


@dataclass(frozen=True, slots=True)
class DeviceForecast:
    """Figures of one lent device; times are those of requests that arrived after the warm-up."""

    requests: int
    seconds: float
    rollout_tokens_s: float  # computed, prompts too
    lent_share: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    in_budget: float


def forecast(
    serving: Path | str, rollout: Path | str, requests: Sequence[Arrival], budgets: Budgets, *, seconds: float,
    warm_s: float = 0.0, mode: Mode = "decode", trajectories: int = 32, seed: int = 0,
) -> DeviceForecast:  # fmt: skip
    """Return what a device with these profiles does under these requests."""
    context = load_profile(serving).max_context_tokens
    if any(one.prompt_tokens + one.output_tokens > context for one in requests):
        raise ConfigError(f"a request is longer than the context of {context} tokens", hint="cut the trace's lengths")
    if load_profile(rollout).max_context_tokens < CONTEXT_TOKENS_MIN:
        raise ConfigError(f"the rollout profile's context is shorter than {CONTEXT_TOKENS_MIN} tokens")
    world = DeviceWorld(
        mode, ListedTraffic(tuple(requests)), seed=seed, until_s=seconds, budgets=budgets, serving=str(serving),
        rollout=str(rollout), switch_s=0.0, breaks=True, trajectories=trajectories, warm_s=warm_s,
    )  # fmt: skip
    return forecast_of(Device(world).run(), budgets, warm_s)


def forecast_of(report: DeviceReport, budgets: Budgets, warm_s: float = 0.0) -> DeviceForecast:
    """Return the figures of a simulated device."""
    served = [one for one in report.served if one.request.arrival_s >= warm_s]
    ttft = sorted(one.ttft_s for one in served)
    tpot = sorted(one.tpot_s for one in served if one.tokens > 1)
    window_s = max(1e-9, report.window_s)
    return DeviceForecast(
        len(served), report.window_s, report.window_rollout_tokens / window_s, report.window_lent_s / window_s,
        quantile(ttft, 0.5), quantile(ttft, 0.99), quantile(tpot, 0.5), quantile(tpot, 0.99),
        sum(one.keeps(budgets) for one in served) / len(served) if served else math.nan,
    )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values; NaN without any."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def _request(number: int, one: Arrival) -> Request:
    name, sampling = f"serving {number}", Sampling(max_tokens=one.output_tokens, ignore_eos=True, seed=number)
    return Request(name, tuple(range(one.prompt_tokens)), sampling, tenant=name, arrival_s=one.at_s)
