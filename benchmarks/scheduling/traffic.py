"""Serving requests of the borrowed devices: each device replays its own part of a trace, at a share of its capacity."""

from __future__ import annotations

import csv
import gzip
import random
from dataclasses import dataclass
from pathlib import Path

from rose.sim.shapes import Arrival

TRACE = "azure2023_conv"


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of one device, recorded or generated; `what` names their origin."""

    what: str
    requests: tuple[Arrival, ...]

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s

    @property
    def requests_per_s(self) -> float:
        return len(self.requests) / self.span_s

    def piece(self, start_s: float, until_s: float, rate: float) -> list[Arrival]:
        """Return requests from `start_s` of the trace on, in a loop, at `rate` times its speed."""
        requests: list[Arrival] = []
        first = next((i for i, request in enumerate(self.requests) if request.at_s >= start_s % self.span_s), 0)
        begin_s, rounds = self.requests[first].at_s, 0
        while True:
            for request in self.requests[first:]:
                at_s = (request.at_s - begin_s + rounds * self.span_s) / rate
                if at_s >= until_s:
                    return requests
                requests.append(Arrival(at_s, request.prompt_tokens, request.output_tokens))
            first, rounds = 0, rounds + 1


def load(folder: Path | None, seed: int) -> Trace:
    path = folder / "traces" / "recorded" / f"{TRACE}.csv.gz" if folder is not None else None
    if path is None or not path.exists():
        return Trace("generated: the recorded trace is not here (--data)", tuple(_generated(seed)))
    with gzip.open(path, "rt", newline="") as file:
        rows = [
            Arrival(float(row["arrival_s"]), max(1, int(row["prompt_tokens"])), max(1, int(row["output_tokens"])))
            for row in csv.DictReader(file)
        ]
    return Trace(f"recorded: {TRACE}", tuple(rows))


def _generated(seed: int) -> list[Arrival]:
    """Return chat traffic: arrivals burstier than Poisson, prompts of about 1,000 tokens, answers of 100 and more."""
    chance, now_s, requests = random.Random(f"traffic {seed}"), 0.0, []
    while now_s < 3600:
        now_s += chance.gammavariate(0.7, 1 / 0.7 / 5.5)
        prompt = min(8000, int(chance.lognormvariate(6.8, 0.7)))
        requests.append(Arrival(now_s, max(1, prompt), max(1, min(1000, int(chance.lognormvariate(4.9, 0.9))))))
    return requests


def spiked(
    trace: Trace, device: int, until_s: float, rate: float, spike: tuple[float, float, float] | None
) -> list[Arrival]:
    """Return the requests of one device. A spike (begin, end, rate) replaces those between its ends."""
    start_s = device * trace.span_s / 17
    calm = trace.piece(start_s, until_s, rate)
    if spike is None:
        return calm
    begin_s, end_s, spike_rate = spike
    more = [
        Arrival(begin_s + request.at_s, request.prompt_tokens, request.output_tokens)
        for request in trace.piece(start_s + trace.span_s / 3, end_s - begin_s, spike_rate)
    ]
    return sorted([r for r in calm if not begin_s <= r.at_s < end_s] + more, key=lambda request: request.at_s)
