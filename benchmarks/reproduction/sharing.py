"""Borrowed devices under each way of sharing: what they lend, and what their users notice.

`decode`      ours, at a share of 0.7 of the budgets
`paper_1.0`   the paper's rule with the whole budgets; `paper_0.7` with the same share as ours
`prism`       memory shared without admission: a step of each model in turn
`reload`      one model in memory at a time, as ServerlessLLM loads them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduling.traffic import Trace

from reproduction.setups import LOAD, PaperSetup
from rose.core.admission import Mode
from rose.sim.lent_timeline import LentTimeline, SaturatedDevice, saturated_requests_per_s
from rose.sim.reload_device import ReloadDevice

WARM_S = 30.0
WAYS: dict[str, tuple[Mode, float]] = {
    "decode": ("decode", 0.7),
    "paper_1.0": ("paper", 1.0),
    "paper_0.7": ("paper", 0.7),
    "prism": ("alternate", 1.0),
    "reload": ("idle", 1.0),
}


@dataclass(frozen=True, slots=True)
class Shared:
    """What devices did in one way of sharing, or alone."""

    timelines: tuple[LentTimeline, ...]
    lent_share: float
    ttft_p99_s: float
    tpot_p99_s: float
    attainment: float
    requests: int


def share(setup: PaperSetup, way: str, trace: Trace, rate: float, devices: int, span_s: float, seed: int) -> Shared:
    """Run the devices; `way` may be `alone` too. The same seed gives every way the same requests."""
    mode, slack_share = WAYS.get(way, ("decode", 0.7))
    budgets = replace(setup.budgets, slack_share=slack_share)
    timelines, ttfts_s, tpots_s, kept = [], [], [], 0
    for number in range(devices):
        start_s = (seed * devices + number) * trace.span_s / 17
        arrivals = trace.piece(start_s, span_s, rate)
        inputs = setup.serving, setup.rollout, budgets, arrivals, span_s, seed * devices + number
        if way == "reload":
            device: SaturatedDevice = ReloadDevice(*inputs, lends=True, mode=mode, reload_s=setup.reload_s)
        else:
            device = SaturatedDevice(*inputs, lends=way != "alone", mode=mode)
        if way != "decode":
            device.admission.breaker = None  # ours
        timelines.append(device.run())
        for served in device.served:
            if served.arrival.at_s >= WARM_S:
                kept += served.keeps(setup.budgets)
                ttfts_s.append(served.first_token_s - served.arrival.at_s)
                if served.tokens > 1:
                    tpots_s.append((served.last_token_s - served.first_token_s) / (served.tokens - 1))
    lent = sum(line.lent_by(line.span_s - 1e-6) - line.lent_by(WARM_S) for line in timelines)
    seconds = sum(line.span_s - WARM_S for line in timelines)
    return Shared(
        tuple(line.shifted(WARM_S) for line in timelines), lent / seconds, _p99(ttfts_s), _p99(tpots_s),
        kept / max(1, len(ttfts_s)), len(ttfts_s),
    )  # fmt: skip


def spread(timelines: Sequence[LentTimeline], count: int) -> tuple[LentTimeline, ...]:
    """Return so many timelines: the same devices at other times, where there are more than were simulated."""
    return tuple(
        line.shifted(line.span_s * (number // len(timelines)) * 0.382 % line.span_s)
        for number, line in ((number, timelines[number % len(timelines)]) for number in range(count))
    )


def rate_of(setup: PaperSetup, trace: Trace) -> float:
    """Return how fast a device replays the trace so that it is loaded to `LOAD`."""
    most = saturated_requests_per_s(setup.serving, setup.budgets, list(trace.requests[:400]))
    return LOAD * most / trace.requests_per_s


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
