"""Reads traffic from range queries of Prometheus: the request rate, and histograms of prompt and answer tokens.

The file is one JSON object with three responses of `/api/v1/query_range`, as they come:

    {"request_rate": ..., "prompt_tokens": ..., "output_tokens": ...}

`request_rate` holds requests a second; several series (one per server) are added up. The other two hold buckets with
the label `le`, of which the newest value counts. docs/plan.md has the queries for vLLM.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rose.bounds import ITEMS_MAX, SECONDS_MAX, UNREADABLE, Label
from rose.errors import ConfigError

EXPORT_BYTES_MAX = 64 << 20
FIELDS = "request_rate, prompt_tokens and output_tokens"

UnixTime = Annotated[float, Meta(ge=0, le=10 * SECONDS_MAX)]
Quantiles = list[tuple[float, float]]  # (share, tokens), rising
Sample = tuple[UnixTime, Annotated[str, Meta(max_length=64)]]


class PrometheusSeries(msgspec.Struct, frozen=True):
    """One series of a range query."""

    metric: Annotated[dict[Label, Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)]
    values: Annotated[tuple[Sample, ...], Meta(min_length=1, max_length=ITEMS_MAX)]


class PrometheusMatrix(msgspec.Struct, frozen=True):
    """The data of a range query."""

    resultType: Literal["matrix"]
    result: Annotated[tuple[PrometheusSeries, ...], Meta(min_length=1, max_length=4096)]


class PrometheusResponse(msgspec.Struct, frozen=True):
    """The response to a range query."""

    status: Literal["success"]
    data: PrometheusMatrix


@dataclass(frozen=True, slots=True)
class PrometheusTraffic:
    """Requests a second at sampled times, and the lengths of prompts and answers."""

    times_s: list[float]
    rates: list[float]
    step_s: float
    prompts: Quantiles
    outputs: Quantiles


class PrometheusExport(msgspec.Struct, frozen=True):
    """The three responses of a file."""

    request_rate: PrometheusResponse
    prompt_tokens: PrometheusResponse
    output_tokens: PrometheusResponse


def is_prometheus(path: Path) -> bool:
    """Return whether a file begins like an export."""
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError:
        return False
    return head.lstrip()[:1] == b"{" and any(name in head for name in (b'"request_rate"', b'"status"'))


def read_prometheus(path: Path, tokens_max: int) -> PrometheusTraffic:
    """Return what an export holds. Raises ConfigError that names what is missing."""
    try:
        with path.open("rb") as file:
            text = file.read(EXPORT_BYTES_MAX + 1)
        if len(text) > EXPORT_BYTES_MAX:
            raise ConfigError(f"{path} has more than {EXPORT_BYTES_MAX >> 20} MiB", hint="query with a larger step")
        export = msgspec.json.decode(text, type=PrometheusExport)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="check the path") from error
    except UNREADABLE as error:
        what = f"{path} is no export of Prometheus: {error}"
        raise ConfigError(what, hint=f"it needs {FIELDS}, each a response of /api/v1/query_range") from error
    totals: dict[float, float] = defaultdict(float)
    for series in export.request_rate.data.result:
        for at_s, text_value in series.values:
            totals[at_s] += _number(path, text_value)
    times = sorted(totals)
    step_s = median(after - before for before, after in pairwise(times)) if len(times) > 1 else 60.0
    prompts, outputs = (
        _quantiles(path, name, response, tokens_max)
        for name, response in (("prompt_tokens", export.prompt_tokens), ("output_tokens", export.output_tokens))
    )
    return PrometheusTraffic(times, [totals[at_s] for at_s in times], step_s, prompts, outputs)


def _quantiles(path: Path, name: str, response: PrometheusResponse, most: int) -> Quantiles:
    """Return (share, tokens) of a histogram, rising; what lies beyond the last bucket counts as its edge."""
    buckets: dict[float, float] = defaultdict(float)
    for series in response.data.result:
        if "le" not in series.metric:
            raise ConfigError(f"{path}: {name} has a series without the label le", hint="query the _bucket series")
        label = series.metric["le"]
        buckets[math.inf if label == "+Inf" else _number(path, label)] += _number(path, series.values[-1][1])
    edges = sorted(edge for edge in buckets if edge < math.inf)
    total = max(buckets.values())
    if not edges or total <= 0:
        raise ConfigError(f"{path}: the histogram {name} is empty", hint="query a range with requests")
    points, reached = [(0.0, 1.0)], 0.0
    for edge in edges:
        reached = max(reached, min(1.0, buckets[edge] / total))
        points.append((reached, min(float(most), max(1.0, edge))))
    return [*points, (1.0, points[-1][1])]


def tokens_at(points: Quantiles, place: float) -> int:
    """Return the length at a share of the distribution, by linear interpolation within its bucket."""
    at = min(len(points) - 1, max(1, bisect_left(points, (place, 0.0))))
    (low, fewer), (high, more) = points[at - 1], points[at]
    return max(1, round(fewer + (more - fewer) * (place - low) / (high - low) if high > low else more))


def _number(path: Path, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e15:
        raise ConfigError(f"{path}: `{text[:40]}` is no count or rate", hint="leave out samples that are NaN")
    return value
