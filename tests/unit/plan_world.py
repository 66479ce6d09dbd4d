"""A small fleet, a small job and short windows, for tests of `rose.plan`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.plan import windows
from rose.plan.fleet import Fleet, FleetInputs, fleet_of
from rose.plan.job import RlJob, job_inputs, job_on
from rose.plan.traffic import FleetTraffic, traffic_by_hand

CONTEXT_TOKENS = 32_768


def small_fleet(**changes: object) -> Fleet:
    inputs = {"devices": "2xh800", "serving": "qwen2.5-7b:tp1", "rollout": "qwen3-8b", "dedicated": 1, "train_gpus": 2}
    return fleet_of(FleetInputs(**(inputs | changes)))


def small_job(fleet: Fleet, text: str = "grpo:8x4,turns=tools,train_s=5") -> RlJob:
    return job_on(fleet, job_inputs(text), 0)


def steady(rate: float = 1.0) -> FleetTraffic:
    return traffic_by_hand(rate, 400, 40, CONTEXT_TOKENS)


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Make windows of 2 and 6 seconds."""
    patch.setattr(windows, "WARM_S", 2.0)
    patch.setattr(windows, "COUNTED_S", 6.0)
    patch.setattr(windows, "WINDOW_S", 8.0)
    patch.setattr(windows, "MINUTE_S", 3.0)


def result(**changes: object) -> windows.WindowResult:
    """Return a window in which 100 requests were all in budget and half of the time was lent."""
    from rose.sim.lent_timeline import BIN_S, LentTimeline

    count = 40
    line = LentTimeline(
        (0.5,) * count, (400_000,) * count, (None,) * count, 1.0, 100, tuple(0.5 * BIN_S * n for n in range(count + 1))
    )
    whole = windows.WindowResult(
        hour=0, requests=100, alone=100, lent=100, lost=0, gained=0, lent_share=0.5, rollout_tokens_s=1000.0,
        unlent_s={"a prompt waits": 60.0}, minutes=(windows.MinuteCount(100, 100, 100),), breaker_trips=0,
        peak_kv_share=0.1, timeline=line,
    )  # fmt: skip
    return replace(whole, **changes)
