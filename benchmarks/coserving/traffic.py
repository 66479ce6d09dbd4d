"""Requests out of a trace: the first so many at a rate, a slice of them, a sample of their lengths, a worst case.

Every function returns traces whose lengths are already scaled and cut to the context, so the load generator keeps
them. A rate is the mean over exactly the requests that are sent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rose.load.traces import Trace, capped, made_trace, with_lengths_scaled

WORST_S = 180.0
WORST_SHARES = (0.95, 1.10)
WORST_STEP_S = 10.0  # for how long one share holds


def scaled(trace: Trace, context_tokens: int) -> Trace:
    """One factor for all lengths: the P99 prompt is a quarter of the context."""
    return capped(with_lengths_scaled(trace, context_tokens), context_tokens)


def cut(trace: Trace, begin: int, end: int) -> Trace:
    """Requests [begin, end), from second 0."""
    arrival_s = trace.arrival_s[begin:end]
    return replace(
        trace,
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=trace.prompt_tokens[begin:end],
        output_tokens=trace.output_tokens[begin:end],
    )


def at_rate(trace: Trace, rate_rps: float) -> Trace:
    """The same requests in the same rhythm, so many a second on average."""
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    if not span_s:
        return replace(trace, arrival_s=np.zeros(len(trace)))
    factor = rate_rps * span_s / len(trace)
    return replace(trace, arrival_s=(trace.arrival_s - trace.arrival_s[0]) / factor)


def sample(trace: Trace, count: int) -> Trace:
    """Evenly out of all of it and shuffled, so that the mix of lengths is the same throughout; all at second 0."""
    places = np.random.default_rng(count).permutation((np.arange(count) * len(trace)) // count)
    return replace(
        trace,
        arrival_s=np.zeros(count),
        prompt_tokens=trace.prompt_tokens[places],
        output_tokens=trace.output_tokens[places],
    )


def with_mix(trace: Trace, whole: Trace) -> Trace:
    """The rhythm of a few requests with the mix of lengths of all, so that a short run can stand for a long one."""
    lengths = sample(whole, len(trace))
    order = np.random.default_rng(len(trace)).permutation(len(trace))  # neighbours in the sample may be alike
    return replace(trace, prompt_tokens=lengths.prompt_tokens[order], output_tokens=lengths.output_tokens[order])


def worst_case(trace: Trace, capacity_rps: float, seed: int, duration_s: float = WORST_S) -> Trace:
    """Poisson arrivals whose rate is drawn anew every ten seconds from 95-110 % of capacity; lengths from the trace."""
    chance = np.random.default_rng([seed, 0x3057])
    arrivals: list[float] = []
    for begin_s in np.arange(0.0, duration_s, WORST_STEP_S):
        width_s = min(WORST_STEP_S, duration_s - begin_s)
        rate_rps = capacity_rps * chance.uniform(*WORST_SHARES)
        count = chance.poisson(rate_rps * width_s)
        arrivals += sorted((begin_s + chance.random(count) * width_s).tolist())
    places = chance.integers(len(trace), size=len(arrivals))
    name = f"{trace.name}, worst case, seed {seed}"
    columns = np.array(arrivals), trace.prompt_tokens[places], trace.output_tokens[places]
    return made_trace(name, *columns, prompt_p99_tokens=trace.prompt_p99_tokens)
