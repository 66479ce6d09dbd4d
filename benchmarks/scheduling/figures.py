"""Figures of a run: the keys of a row."""

from __future__ import annotations

from typing import Any

from rose.sim.batch_cluster import BatchResult


def row_of(result: BatchResult, bound_s: float) -> dict[str, Any]:
    turns = sorted(result.turn_s)
    return {
        "completion_s": round(result.completion_s, 1),
        "p95_trajectory_s": round(result.end_s[int(0.95 * (len(result.end_s) - 1))], 1),
        "turn_p99_s": round(turns[int(0.99 * (len(turns) - 1))], 2),
        "prefix_hit_ratio": round(result.cached_tokens / max(1, result.prompt_tokens), 4),
        "reprefilled_tokens": max(0, result.known_tokens - result.cached_tokens),
        "evictions": result.evictions,
        "idle_share": round(result.idle_s / max(1e-9, result.usable_s), 4),
        "over_lower_bound": round(result.completion_s / bound_s, 3),
        "borrowed_device_s": round(result.borrowed_s, 1),
    }
