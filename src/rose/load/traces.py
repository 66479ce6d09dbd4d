"""A trace: when requests arrive and how long they and their answers are, and the few things done to one before a run.

Every change returns a new trace and leaves a sentence in `notes`, so that a report can say what was really sent. The
order matters and is that of `fitted`: lengths are scaled by the whole trace, so that two windows of one trace are
scaled alike; then it is cut in the trace's own time; then time is squeezed; then requests are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rose.errors import ConfigError
from rose.load.statistics import mean, percentile

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# The P99 prompt takes this share of the context, so that a long prompt, its answer and a few others fit together.
PROMPT_SHARE = 0.25
Lengths = Literal["shrink", "fit", "keep"]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival, in seconds from the start of the run; lengths are at least one token.

    `prompt_p99_tokens` is what lengths are scaled by: that of the whole source, of which these may be a few rows.
    """

    name: str
    arrival_s: Floats
    prompt_tokens: Integers
    output_tokens: Integers
    prompt_p99_tokens: float
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.arrival_s) == len(self.prompt_tokens) == len(self.output_tokens)
        assert np.all(np.diff(self.arrival_s) >= 0), "arrivals are in order"

    def __len__(self) -> int:
        return len(self.arrival_s)

    def facts(self) -> dict[str, Any]:
        """What a report says about it."""
        span_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return {
            "name": self.name,
            "requests": len(self),
            "span_s": round(span_s, 3),
            "requests_per_s": round((len(self) - 1) / span_s, 4) if span_s else None,
            "prompt_tokens": _summary(self.prompt_tokens),
            "output_tokens": _summary(self.output_tokens),
            "notes": list(self.notes),
        }


def made_trace(
    name: str,
    arrival_s: Floats,
    prompt_tokens: Integers,
    output_tokens: Integers,
    prompt_p99_tokens: float | None = None,
) -> Trace:
    """A trace from raw columns: sorted by arrival, every length at least one token, and not empty."""
    if not len(arrival_s):
        raise ConfigError(f"{name} has no requests", hint="give a trace with at least one row")
    order = np.argsort(arrival_s, kind="stable")
    prompts, outputs = (np.maximum(1, column[order]) for column in (prompt_tokens, output_tokens))
    return Trace(name, arrival_s[order], prompts, outputs, prompt_p99_tokens or percentile(prompts, 99))


def fitted(
    trace: Trace,
    context_tokens: int,
    *,
    lengths: Lengths = "shrink",
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
    requests: int | None = None,
) -> Trace:
    """What will be sent: `duration_s` counts in the time of the run, `start_s` in the time of the trace."""
    if lengths != "keep":
        trace = with_lengths_scaled(trace, context_tokens, may_grow=lengths == "fit")
    trace = capped(trace, context_tokens)
    _check_scale(rate_scale)
    end_s = None if duration_s is None else start_s + duration_s * rate_scale
    trace = with_rate_scaled(windowed(trace, start_s, end_s), rate_scale)
    return trace if requests is None else limited(trace, requests)


def length_factor(trace: Trace, context_tokens: int) -> float:
    """The one factor that makes the P99 prompt a quarter of the context."""
    return PROMPT_SHARE * context_tokens / trace.prompt_p99_tokens


def with_lengths_scaled(trace: Trace, context_tokens: int, *, may_grow: bool = True) -> Trace:
    """Prompts and outputs by the same factor."""
    factor = length_factor(trace, context_tokens)
    if factor >= 1 and not may_grow:
        return trace
    return _changed(
        trace,
        f"lengths x {factor:.4g}: the P99 prompt is a quarter of the context of {context_tokens}",
        prompt_tokens=_scaled(trace.prompt_tokens, factor),
        output_tokens=_scaled(trace.output_tokens, factor),
        prompt_p99_tokens=trace.prompt_p99_tokens * factor,
    )


def capped(trace: Trace, context_tokens: int) -> Trace:
    """No request is longer than the context. A prompt leaves room for one token; the output takes what is left."""
    if context_tokens < 2:
        raise ConfigError(f"a context of {context_tokens} holds no request", hint="give --context at least 2")
    prompts = np.minimum(trace.prompt_tokens, context_tokens - 1)
    outputs = np.minimum(trace.output_tokens, context_tokens - prompts)
    cut = int(np.sum((prompts < trace.prompt_tokens) | (outputs < trace.output_tokens)))
    if not cut:
        return trace
    note = f"{cut} of {len(trace)} requests cut to the context of {context_tokens}"
    return _changed(trace, note, prompt_tokens=prompts, output_tokens=outputs)


def windowed(trace: Trace, start_s: float = 0.0, end_s: float | None = None) -> Trace:
    """The requests of [start_s, end_s), counted from start_s."""
    kept = (trace.arrival_s >= start_s) & (trace.arrival_s < (np.inf if end_s is None else end_s))
    shown = f"from {start_s:g} s to {'the end' if end_s is None else f'{end_s:g} s'}"
    if not kept.any():
        hint = f"its requests arrive from {trace.arrival_s[0]:g} s to {trace.arrival_s[-1]:g} s"
        raise ConfigError(f"{trace.name} has no requests {shown}", hint=hint)
    if start_s == 0 and kept.all():
        return trace
    inside = _picked(trace, kept)
    return _changed(inside, f"window {shown}", arrival_s=inside.arrival_s - start_s)


def with_rate_scaled(trace: Trace, factor: float) -> Trace:
    """`factor` times as many requests a second: the same requests, time squeezed."""
    _check_scale(factor)
    if factor == 1:
        return trace
    return _changed(trace, f"rate x {factor:g}", arrival_s=trace.arrival_s / factor)


def limited(trace: Trace, requests: int) -> Trace:
    """The first so many requests."""
    if requests < 1:
        raise ConfigError(f"{requests} requests are none", hint="give --requests at least 1")
    if requests >= len(trace):
        return trace
    return _changed(_picked(trace, slice(requests)), f"the first {requests} requests of {len(trace)}")


def _check_scale(factor: float) -> None:
    if not (np.isfinite(factor) and factor > 0):
        raise ConfigError(f"a rate cannot be scaled by {factor:g}", hint="give --rate-scale a number above 0")


def _scaled(lengths: Integers, factor: float) -> Integers:
    return np.maximum(1, np.floor(lengths * factor + 0.5)).astype(np.int64)


def _picked(trace: Trace, which: Any) -> Trace:
    columns = ("arrival_s", "prompt_tokens", "output_tokens")
    return replace(trace, **{column: getattr(trace, column)[which] for column in columns})


def _changed(trace: Trace, note: str, **columns: Any) -> Trace:
    return replace(trace, notes=(*trace.notes, note), **columns)


def _summary(tokens: Integers) -> dict[str, float]:
    tails = {f"p{percent}": int(percentile(tokens, percent)) for percent in (50, 99)}
    return {"mean": round(mean(tokens), 1), **tails, "max": int(tokens.max())}
