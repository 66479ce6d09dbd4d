"""Users' requests on the borrowed devices: each device its own piece of a trace, at a share of what it can serve."""

from __future__ import annotations

import csv
import gzip
import random
from dataclasses import dataclass
from pathlib import Path

TRACE = "azure2023_conv"


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    what: str
    requests: tuple[Arrival, ...]

    @property
    def span_s(self) -> float:
        return self.requests[-1].at_s

    @property
    def requests_per_s(self) -> float:
        return len(self.requests) / self.span_s

    def piece(self, start_s: float, until_s: float, rate: float) -> list[Arrival]:
        """From `start_s` of the trace on, around its end, at `rate` times its own pace."""
        found: list[Arrival] = []
        first = next((i for i, request in enumerate(self.requests) if request.at_s >= start_s % self.span_s), 0)
        begin_s, rounds = self.requests[first].at_s, 0
        while True:
            for request in self.requests[first:]:
                at_s = (request.at_s - begin_s + rounds * self.span_s) / rate
                if at_s >= until_s:
                    return found
                found.append(Arrival(at_s, request.prompt_tokens, request.output_tokens))
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
    """Chat: arrivals a little more bursty than chance, prompts of a thousand tokens, answers of a hundred and more."""
    chance, now_s, made = random.Random(f"traffic {seed}"), 0.0, []
    while now_s < 3600:
        now_s += chance.gammavariate(0.7, 1 / 0.7 / 5.5)
        prompt = min(8000, int(chance.lognormvariate(6.8, 0.7)))
        made.append(Arrival(now_s, max(1, prompt), max(1, min(1000, int(chance.lognormvariate(4.9, 0.9))))))
    return made


def spiked(
    trace: Trace, device: int, until_s: float, rate: float, spike: tuple[float, float, float] | None
) -> list[Arrival]:
    """One device's requests; with a spike (begin, end, rate) they come at that rate meanwhile."""
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
