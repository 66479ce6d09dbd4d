"""Made-up traffic by name, the same for the same seed: `poisson:rate=2`, `gamma:rate=2,cv=4` and so on.

Arrivals are drawn from the process that the name says; lengths are log-normal, cut at the longest of the trace they
are shaped after. The constants are our own fit of published statistics of the Azure conversation trace of 2023:

    tokens     published mean / P50 / P99     this fit
    prompt     1155 / 1020 / 4142             1203 / 1000 / 4130
    output      211 /  129 /  601              179 /  148 /  626

The real outputs have two humps, which one log-normal cannot have: the fit is nearest in the tail. Everything is drawn
from streams of its own (arrivals, thinning, spikes, lengths), so a longer run of the same seed begins with the
shorter one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rose.config.spec_text import nearest_example, read_settings
from rose.errors import ConfigError
from rose.load.traces import Floats, Integers, Trace, made_trace

PROMPT_FIT = (1000.0, 0.61, 14050)  # median, sigma of the logarithm, longest
PROMPT_P99 = 1000.0 * math.exp(0.61 * 2.3263)  # of the fit itself: a short run is scaled as a long one is
OUTPUT_FIT = (148.0, 0.62, 1000)

DURATION_S = 60.0  # when neither a duration nor a number of requests is given
REQUESTS_MAX = 2_000_000  # a mistyped rate must not fill the memory

_ARRIVALS, _THINNING, _SPIKES, _PROMPTS, _OUTPUTS = range(5)


Settings = Mapping[str, float]
Process = Callable[[Settings, int, float], Floats]
"""Returns arrivals by the settings, the seed, and the seconds until the last."""


@dataclass(frozen=True, slots=True)
class Generator:
    """One kind of traffic. A setting whose default is NaN must be given."""

    arrivals: Process
    settings: Settings
    example: str
    summary: str


def _stream(seed: int, purpose: int) -> np.random.Generator:
    """Return one of the independent random streams of a seed."""
    return np.random.default_rng([seed, purpose])


def _poisson(settings: Settings, seed: int, until_s: float) -> Floats:
    rate = settings["rate"]
    return _renewal(lambda rng, count: rng.exponential(1 / rate, count), rate, seed, until_s)


def _gamma(settings: Settings, seed: int, until_s: float) -> Floats:
    shape = settings["cv"] ** -2
    scale = 1 / (settings["rate"] * shape)
    return _renewal(lambda rng, count: rng.gamma(shape, scale, count), settings["rate"], seed, until_s)


def _spikes(settings: Settings, seed: int, until_s: float) -> Floats:
    """Return one spike at a random place of every `every_s`; `rate` is that of the quiet time."""
    every_s, for_s, factor = settings["every_s"], settings["for_s"], settings["factor"]
    if for_s > every_s:
        raise ConfigError(f"a spike of {for_s:g} s does not fit into {every_s:g} s", hint="lower for_s")
    _check_size(until_s / every_s)
    starts_s = _stream(seed, _SPIKES).random(math.ceil(until_s / every_s) + 1) * (every_s - for_s)

    def load(at_s: Floats) -> Floats:
        since_s = at_s % every_s - starts_s[(at_s // every_s).astype(np.int64)]
        return np.where((since_s >= 0) & (since_s < for_s), factor, 1.0)

    return _thinned(load, max(1.0, factor), settings["rate"], seed, until_s)


def _day(settings: Settings, seed: int, until_s: float) -> Floats:
    """Return a load that is lowest at the start, `swing` times as high half a day later; `rate` is a day's mean."""
    day_s = until_s if math.isinf(settings["day_s"]) else settings["day_s"]
    depth = math.log(settings["swing"]) / 2
    usual = float(np.i0(depth))  # the mean of exp(depth cos) over a turn
    peak = math.exp(abs(depth)) / usual

    def load(at_s: Floats) -> Floats:
        return np.exp(-depth * np.cos(2 * np.pi * at_s / day_s)) / usual

    return _thinned(load, peak, settings["rate"], seed, until_s)


_MUST = math.nan
GENERATORS = {
    "poisson": Generator(_poisson, {"rate": _MUST}, "poisson:rate=2", "independent arrivals"),
    "gamma": Generator(
        _gamma, {"rate": _MUST, "cv": 4.0}, "gamma:rate=2,cv=4", "bursts; cv is deviation over mean of the gaps"
    ),
    "spikes": Generator(
        _spikes,
        {"rate": _MUST, "factor": 8.0, "every_s": 60.0, "for_s": 10.0},
        "spikes:rate=1,factor=8,every_s=60,for_s=10",
        "bursts at random places",
    ),
    "day": Generator(
        _day, {"rate": _MUST, "swing": 8.0, "day_s": math.inf}, "day:rate=1", "a day's curve; the run is one day"
    ),
}


def generated(spec: str, *, seed: int = 0, duration_s: float | None = None, requests: int | None = None) -> Trace:
    """Return the traffic that `spec` names, for so many seconds or requests, whichever ends first."""
    generator, settings = parse_spec(spec)
    if requests is not None and duration_s is None:
        arrivals = _until_enough(generator, settings, seed, requests)
    else:
        duration_s = DURATION_S if duration_s is None else duration_s
        arrivals = generator.arrivals(settings, seed, duration_s)[:requests]
    if not arrivals.size:
        raise ConfigError(f"`{spec}` makes no request in {duration_s:g} s", hint="raise the rate or the duration")
    prompts = _lengths(_stream(seed, _PROMPTS), PROMPT_FIT, arrivals.size)
    outputs = _lengths(_stream(seed, _OUTPUTS), OUTPUT_FIT, arrivals.size)
    return made_trace(spec, arrivals, prompts, outputs, PROMPT_P99)


def parse_spec(spec: str) -> tuple[Generator, dict[str, float]]:
    """Return the generator and all its settings: `gamma:rate=2,cv=4`. ConfigError names the nearest generator."""
    name = spec.partition(":")[0]
    if name not in GENERATORS:
        examples = {known: generator.example for known, generator in GENERATORS.items()}
        hint = nearest_example(name, examples, "give a trace file or one of")
        raise ConfigError(f"there is no generator `{name}`, and no file of that name", hint=hint)
    generator = GENERATORS[name]
    return generator, read_settings("generator", name, spec, generator.settings, generator.example)


def _until_enough(generator: Generator, settings: dict[str, float], seed: int, requests: int) -> Floats:
    """Return the first so many arrivals; the time starts with their usual duration and doubles until they suffice."""
    if requests < 1:
        raise ConfigError(f"{requests} requests are none", hint="give --requests at least 1")
    until_s = requests / settings["rate"]
    if math.isinf(settings.get("day_s", 0.0)):
        settings["day_s"] = until_s
    while (arrivals := generator.arrivals(settings, seed, until_s)).size < requests:
        until_s *= 2
    return arrivals[:requests]


def _check_size(requests: float) -> None:
    if requests > REQUESTS_MAX:
        raise ConfigError(f"that would be {requests:.3g} requests or more", hint=f"stay below {REQUESTS_MAX}")


def _renewal(gaps: Callable[[np.random.Generator, int], Floats], rate: float, seed: int, until_s: float) -> Floats:
    """Return arrivals with independent gaps, from one stream: more draws change no earlier gap."""
    _check_size(rate * until_s)
    rng = _stream(seed, _ARRIVALS)
    drawn = gaps(rng, max(64, math.ceil(rate * until_s)))
    while (arrivals := np.cumsum(drawn))[-1] < until_s:
        _check_size(drawn.size)
        drawn = np.concatenate([drawn, gaps(rng, drawn.size)])
    return arrivals[arrivals < until_s]


def _thinned(load: Callable[[Floats], Floats], peak: float, rate: float, seed: int, until_s: float) -> Floats:
    """Return a Poisson process at the peak of a changing load, thinned by the load at each moment."""
    candidates = _poisson({"rate": rate * peak}, seed, until_s)
    return candidates[_stream(seed, _THINNING).random(candidates.size) * peak < load(candidates)]


def _lengths(rng: np.random.Generator, fit: tuple[float, float, int], count: int) -> Integers:
    median, sigma, longest = fit
    drawn = np.exp(math.log(median) + sigma * rng.standard_normal(count))
    return np.clip(np.rint(drawn), 1, longest).astype(np.int64)
