"""Who is measured on which requests, and in what order.

The requests of a run are cut into consecutive segments. A segment is replayed under every mode that takes part in it,
one after the other, so that the modes meet the same requests and nearly the same weather of the machine; which mode
goes first changes from segment to segment. Modes of which fewer requests are wanted take part in fewer segments,
spread evenly. Rollouts alone take part in all of them, for a short time: every segment then has its own measure of
what a dedicated device would have done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MODES = ("alone_1", "alone_2", "decode", "alternate", "fcfs", "halves", "rollouts_alone", "idle", "paper")
ALONE = ("alone_1", "alone_2")
WORST_MODES = (*ALONE, "decode", "idle")

REQUESTS_MOST, REQUESTS_MANY, REQUESTS_FEW = 2500, 1000, 300
CAREFUL = (*ALONE, "decode")
MANY = (*CAREFUL, "idle")

SEGMENT_S = 75.0
SEGMENTS_MIN = 4
ROLLOUTS_ALONE_S = 20.0
PIECE_OVERHEAD_S = 5.0  # starting clients, rollouts that warm up, draining


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests [begin, end) of the run."""

    number: int
    begin: int
    end: int

    @property
    def requests(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment under one mode: what is measured at a time."""

    segment: Segment
    mode: str


def requests_wanted(trace: str, load: str, mode: str, requests: int | None = None) -> int:
    """Most for the comparison that counts, few where a clear loss is to be shown."""
    if requests is not None:
        return requests if mode in MANY else min(requests, REQUESTS_FEW)
    if mode in CAREFUL and trace == "azure2023_conv" and load == "capacity:0.2":
        return REQUESTS_MOST
    return REQUESTS_MANY if mode in MANY else REQUESTS_FEW


def segments_of(requests: int, rate_rps: float, segment_s: float = SEGMENT_S) -> list[Segment]:
    """Of equal size, as near to `segment_s` long as it goes, and at least a few of them."""
    assert requests > 0 and rate_rps > 0
    count = max(SEGMENTS_MIN, round(requests / (rate_rps * segment_s)))
    count = min(count, requests)
    edges = [round(number * requests / count) for number in range(count + 1)]
    return [Segment(number, begin, end) for number, (begin, end) in enumerate(pairwise(edges))]


def taking_part(wanted: int, segments: Sequence[Segment]) -> list[int]:
    """Numbers of the fewest segments, evenly spread, that hold as many requests as wanted."""
    total = sum(segment.requests for segment in segments)
    count = min(len(segments), max(1, math.ceil(wanted * len(segments) / total - 1e-9)))
    return [int((place + 0.5) * len(segments) / count) for place in range(count)]


def rotated(modes: Sequence[str], number: int) -> list[str]:
    """Everybody is first once in so many segments."""
    first = number % len(modes) if modes else 0
    return [*modes[first:], *modes[:first]]


def pieces_of(segments: Sequence[Segment], wanted: dict[str, int]) -> list[Piece]:
    """Everything to measure, in order; `wanted` is how many requests each mode should see."""
    places = {mode: set(taking_part(count, segments)) for mode, count in wanted.items()}
    if "rollouts_alone" in places:
        places["rollouts_alone"] = {segment.number for segment in segments}
    return [
        Piece(segment, mode)
        for segment in segments
        for mode in rotated([mode for mode in wanted if segment.number in places[mode]], segment.number)
    ]


def planned_s(piece: Piece, rate_rps: float, rollouts_alone_s: float) -> float:
    """How long a piece takes, about."""
    span_s = rollouts_alone_s if piece.mode == "rollouts_alone" else piece.segment.requests / rate_rps
    return span_s + PIECE_OVERHEAD_S


def requests_in_time(wanted: dict[str, int], rate_rps: float, time_s: float) -> float:
    """Which share of the wanted requests fits into the time; 1 if all do."""
    serving = {mode: count for mode, count in wanted.items() if mode != "rollouts_alone"}
    total = max(serving.values(), default=1)
    segments = max(SEGMENTS_MIN, round(total / (rate_rps * SEGMENT_S)))
    shares = [count / total for count in serving.values()]
    overhead_s = PIECE_OVERHEAD_S * segments * sum(shares) + PIECE_OVERHEAD_S * len(shares)
    if "rollouts_alone" in wanted:
        overhead_s += segments * (ROLLOUTS_ALONE_S + PIECE_OVERHEAD_S)
    replay_s = sum(serving.values()) / rate_rps
    return min(1.0, max(0.0, time_s - overhead_s) / replay_s) if replay_s else 1.0
