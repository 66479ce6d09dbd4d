"""The traffic of a fleet over the hours of a day, and the part of it that one replica sees in a window.

A trace of requests (our CSV, Azure's, Mooncake's JSON lines) is replayed: each request goes to a replica at random, as
behind a balancer that does not look at load. Rates, from Prometheus or by hand, become Poisson arrivals with lengths
drawn from a distribution. Hours that the trace does not cover are taken to be like those that it covers.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from rose.errors import ConfigError
from rose.load.prometheus import read_prometheus, tokens_at
from rose.load.traces import Trace, capped, read_trace
from rose.sim.shapes import Arrival

HOUR_S, DAY_HOURS, DAY_S = 3600.0, 24, 86_400.0
UNIX_TIME_MIN = 1e9  # seconds; arrivals that begin beyond it are dates
UNIX_TIME_MAX = 1e11  # the year 5138; Unix milliseconds are beyond it
SPARSE_REQUESTS, SPARSE_GAP_S = 10, 20.0  # a fleet with so little traffic needs no plan
SPAN_S_MAX = 14 * 86_400.0  # twenty minutes in milliseconds look like as much
RATE_MAX = 1e6  # requests a second of a fleet
TRACE_BYTES_MAX = 512 << 20
SAMPLES_SHARE_MIN = 0.5  # of an hour, for it to count
GAP_S = 1800.0  # a longer pause between requests is told
ARRIVALS_MAX = 200_000  # of one replica in one window; more cannot be served, and would take hours to simulate

Span = tuple[float, float]  # begin and end in seconds of the trace


class RequestSource(Protocol):
    """A source of requests: a recorded trace, or rates."""

    def count(self, span: Span) -> float: ...
    def arrivals(self, span: Span, share: float, chance: random.Random) -> list[Arrival]: ...


@dataclass(frozen=True, slots=True)
class HourOfTraffic:
    """One hour of the day: the spans of the trace that it covers, one per day, and requests a second of the fleet."""

    hour: int
    spans: tuple[Span, ...]
    rate: float

    def window(self, place: float, seconds: float) -> Span:
        """Return the window at `place`, from 0 to 1, of all that the trace has of this hour."""
        lengths = [max(0.0, end_s - begin_s - seconds) for begin_s, end_s in self.spans]
        at = place * sum(lengths)
        for (begin_s, _), length in zip(self.spans, lengths, strict=True):
            if at <= length:
                return begin_s + at, begin_s + at + seconds
            at -= length
        begin_s, end_s = self.spans[-1]
        return max(begin_s, end_s - seconds), max(begin_s, end_s - seconds) + seconds


@dataclass(frozen=True, slots=True)
class FleetTraffic:
    """The traffic of the whole fleet."""

    what: str
    source: RequestSource
    hours: tuple[HourOfTraffic, ...]
    notes: tuple[str, ...] = ()

    @property
    def requests_per_day(self) -> float:
        """Return the requests of 24 hours; hours without data count like the mean of the others."""
        return 24 * HOUR_S * sum(hour.rate for hour in self.hours) / len(self.hours)

    def busiest(self, seconds: float) -> Span:
        """Return the window with the most requests."""
        best, span = -1.0, (0.0, seconds)
        for hour in self.hours:
            for begin_s, end_s in hour.spans:
                for at_s in np.arange(begin_s, max(begin_s + 1, end_s - seconds), seconds / 4):
                    window = float(at_s), float(at_s) + seconds
                    if (count := self.source.count(window)) > best:
                        best, span = count, window
        return span


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """Requests of a trace."""

    trace: Trace

    def count(self, span: Span) -> float:
        low, high = np.searchsorted(self.trace.arrival_s, span)
        return float(high - low)

    def arrivals(self, span: Span, share: float, chance: random.Random) -> list[Arrival]:
        trace = self.trace
        low, high = np.searchsorted(trace.arrival_s, span)
        kept = [place for place in range(low, high) if chance.random() < share]
        _check_arrivals(len(kept), span)
        return [
            Arrival(float(trace.arrival_s[i]) - span[0], int(trace.prompt_tokens[i]), int(trace.output_tokens[i]))
            for i in kept
        ]


@dataclass(frozen=True, slots=True)
class RateTraffic:
    """Poisson arrivals at rates that change at `times_s`, with lengths drawn from two distributions."""

    times_s: Sequence[float]
    rates: Sequence[float]
    prompt_tokens: Callable[[float], int]  # the quantile of the distribution
    output_tokens: Callable[[float], int]

    def rate_at(self, at_s: float) -> float:
        return self.rates[max(0, bisect_left(self.times_s, at_s) - 1)]

    def count(self, span: Span) -> float:
        return sum(self.rate_at(at_s) for at_s in np.arange(*span, 10.0)) * 10.0

    def arrivals(self, span: Span, share: float, chance: random.Random) -> list[Arrival]:
        most = share * max(self.rate_at(at_s) for at_s in np.arange(*span, 1.0))
        made: list[Arrival] = []
        at_s = span[0]
        while most > 0:
            at_s += chance.expovariate(most)
            if at_s >= span[1]:
                break
            if chance.random() * most < share * self.rate_at(at_s):
                lengths = self.prompt_tokens(chance.random()), self.output_tokens(chance.random())
                made.append(Arrival(at_s - span[0], *lengths))
                _check_arrivals(len(made), span)
        return made


def recorded_traffic(path: Path, context_tokens: int, hours: int, window_s: float) -> FleetTraffic:
    """Return the traffic of a trace file. Raises ConfigError for what cannot be a trace in seconds."""
    if path.exists() and path.stat().st_size > TRACE_BYTES_MAX:
        raise ConfigError(f"trace {path} has more than {TRACE_BYTES_MAX >> 20} MiB", hint="give a shorter part of it")
    trace = capped(read_trace(path), context_tokens)
    check_unit(path, trace)
    first_s = 0.0
    if trace.arrival_s[0] > UNIX_TIME_MIN:  # hours of the day are then those of UTC
        trace = replace(trace, arrival_s=trace.arrival_s - trace.arrival_s[0] // DAY_S * DAY_S)
        first_s = float(trace.arrival_s[0])
    span_s = float(trace.arrival_s[-1]) - first_s
    if span_s > SPAN_S_MAX:
        raise ConfigError(
            f"trace {path} spans {span_s / 86_400:,.0f} days, more than 14: are its arrivals in milliseconds?",
            hint="arrival_s counts seconds from the start; divide milliseconds by 1000, or cut the trace",
        )
    source, notes = RecordedTraffic(trace), list(trace.notes)
    gaps = np.diff(trace.arrival_s)
    if (long := int((gaps > GAP_S).sum())) > 0:
        what = f"{long} pauses without a request, the longest {gaps.max() / HOUR_S:.1f} h: counted as no traffic"
        notes.append(what)
    spans: dict[int, list[Span]] = defaultdict(list)
    last_s = first_s + span_s
    for number in range(int(first_s // HOUR_S), int(last_s // HOUR_S) + 1):
        begin_s, end_s = max(first_s, number * HOUR_S), min(last_s, (number + 1) * HOUR_S)
        is_new = number % DAY_HOURS not in spans
        if (end_s - begin_s >= window_s or not spans) and not (is_new and len(spans) >= hours):
            spans[number % DAY_HOURS].append((begin_s, max(end_s, begin_s + 1.0)))
    if span_s < window_s:
        notes.append(f"the trace has only {span_s:.0f} s of a window of {window_s:.0f} s; the rest is without requests")
    what = f"{path.name}: {len(trace):,} requests in {span_s / HOUR_S:.2f} h"
    if is_sparse(trace):
        what += f", one in {span_s / (len(trace) - 1):,.0f} s (are its arrivals in milliseconds?)"
    return FleetTraffic(what, source, _hours(source, spans), (*notes, *_coverage(len(spans))))


def check_unit(path: Path, trace: Trace) -> None:
    """Refuse arrivals that can only be a Unix time in milliseconds or less."""
    if trace.arrival_s[0] > UNIX_TIME_MAX:
        raise ConfigError(
            f"trace {path} begins {trace.arrival_s[0]:.4g} seconds after 1970, after the year 5000: are its arrivals "
            "in milliseconds?",
            hint="arrival_s counts seconds; divide milliseconds by 1000",
        )


def is_sparse(trace: Trace) -> bool:
    """Return whether arrivals are whole numbers and far apart, as a short trace in milliseconds has them."""
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    is_whole = bool((trace.arrival_s == np.floor(trace.arrival_s)).all())
    return is_whole and len(trace) >= SPARSE_REQUESTS and span_s > SPARSE_GAP_S * (len(trace) - 1)


def prometheus_traffic(path: Path, context_tokens: int, hours: int) -> FleetTraffic:
    """Return the traffic of an export; hours that lack half of their samples are left out, not taken for idle."""
    read = read_prometheus(path, context_tokens // 2)
    inside: dict[int, list[float]] = defaultdict(list)
    for at_s in read.times_s:
        inside[int(at_s // HOUR_S)].append(at_s)
    spans: dict[int, list[Span]] = defaultdict(list)
    known = {number for number, times in inside.items() if len(times) * read.step_s >= SAMPLES_SHARE_MIN * HOUR_S}
    for number in sorted(known):
        if len(spans) < hours or number % DAY_HOURS in spans:
            spans[number % DAY_HOURS].append((inside[number][0], inside[number][-1] + read.step_s))
    if not spans:
        raise ConfigError(f"{path}: no hour has half of its samples", hint="query at least an hour, with a small step")
    notes = ["Poisson arrivals; prompt and answer lengths drawn independently of each other from the histograms"]
    if missing := max(inside) - min(inside) + 1 - len(known):
        notes.append(f"{missing} hours have less than half of their samples and are left out, not counted as idle")
    source = RateTraffic(
        read.times_s, read.rates, lambda place: tokens_at(read.prompts, place),
        lambda place: tokens_at(read.outputs, place),
    )  # fmt: skip
    return rate_traffic(f"{path.name}: {len(read.times_s):,} samples every {read.step_s:.0f} s", source, spans, notes)


def rate_traffic(what: str, source: RateTraffic, spans: dict[int, list[Span]], notes: Sequence[str]) -> FleetTraffic:
    """Return traffic by rates; `spans` has what is known of each hour of the day."""
    if any(not 0 <= rate <= RATE_MAX for rate in source.rates):
        raise ConfigError(
            f"{what}: a rate is not between 0 and {RATE_MAX:,.0f} a second", hint="give requests a second"
        )
    return FleetTraffic(what, source, _hours(source, spans), (*notes, *_coverage(len(spans))))


def traffic_by_hand(rate: float, prompt_tokens: float, output_tokens: float, context_tokens: int) -> FleetTraffic:
    """Return steady traffic: Poisson arrivals, lengths exponential with these means."""
    if not 0 <= rate <= RATE_MAX:
        raise ConfigError(f"{rate:g} requests a second cannot be planned for", hint=f"give --rate 0 to {RATE_MAX:,.0f}")
    for option, mean in (("--prompt-tokens", prompt_tokens), ("--output-tokens", output_tokens)):
        if not 1 <= mean < context_tokens:
            raise ConfigError(
                f"{option} {mean:g} is no mean length", hint=f"give 1 to {context_tokens - 1}: prompt or answer tokens"
            )
    half = context_tokens // 2
    source = RateTraffic(
        [0.0], [rate], lambda place: _exponential(prompt_tokens, place, half),
        lambda place: _exponential(output_tokens, place, half),
    )  # fmt: skip
    note = f"Poisson arrivals; lengths exponential about {prompt_tokens:g} and {output_tokens:g} tokens (assumed)"
    return rate_traffic(f"{rate:g} requests/s by hand", source, {0: [(0.0, HOUR_S)]}, [note])


def _exponential(mean: float, place: float, most: int) -> int:
    return min(most, max(1, round(-mean * float(np.log1p(-min(place, 1 - 1e-9))))))


def _hours(source: RequestSource, spans: dict[int, list[Span]]) -> tuple[HourOfTraffic, ...]:
    hours = []
    for hour, parts in sorted(spans.items()):
        seconds = sum(end_s - begin_s for begin_s, end_s in parts)
        hours.append(HourOfTraffic(hour, tuple(parts), sum(source.count(part) for part in parts) / max(1.0, seconds)))
    return tuple(hours)


def _coverage(hours: int) -> list[str]:
    if hours >= DAY_HOURS:
        return []
    return [f"{hours} of 24 hours are known; the others are taken to be like {'it' if hours == 1 else 'them'}"]


def _check_arrivals(count: int, span: Span) -> None:
    if count > ARRIVALS_MAX:
        what = f"more than {ARRIVALS_MAX:,} requests in {span[1] - span[0]:.0f} s for one replica"
        raise ConfigError(what, hint="give more --devices, or check the unit of the trace's arrivals")
