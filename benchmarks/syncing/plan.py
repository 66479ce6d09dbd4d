"""What is measured, how often, and what was wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import harness

LARGE, SMALL = 500_000_000, 100_000_000
LINKS_MBIT_S = (None, 2000, 200)  # the fastest first: whatever warms up does so there
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Setting:
    """One relay with some receivers; every method on every link."""

    relay: str
    parameters: int
    receivers: int
    links_mbit_s: Sequence[int | None]
    repeats: int
    late_joiner: bool = False
    slow_full: bool = False  # also the full transfer on the slowest link


def settings(quick: bool) -> list[Setting]:
    if quick:
        return [
            Setting("http", LARGE, 1, LINKS_MBIT_S, 2, late_joiner=True, slow_full=True),
            Setting("filesystem", SMALL, 1, (None,), 1),
            Setting("mooncake", SMALL, 1, (None,), 1),
            Setting("object", SMALL, 1, (None, 2000), 1),
            Setting("http", SMALL, 8, (None,), 1),
        ]
    return [
        Setting("http", LARGE, 1, LINKS_MBIT_S, 5, late_joiner=True, slow_full=True),
        Setting("http", LARGE, 2, LINKS_MBIT_S, 3),
        Setting("http", SMALL, 8, LINKS_MBIT_S, 3),
        Setting("object", LARGE, 1, LINKS_MBIT_S, 3),
        Setting("filesystem", LARGE, 1, (None,), 5, late_joiner=True),
        Setting("filesystem", LARGE, 2, (None,), 3),
        Setting("filesystem", SMALL, 8, (None,), 3),
        Setting("mooncake", LARGE, 1, (None,), 3),
        Setting("mooncake", SMALL, 8, (None,), 1),
        Setting("object", SMALL, 8, LINKS_MBIT_S, 1),
        Setting("mooncake", LARGE, 2, (None,), 1),
        Setting("object", LARGE, 2, LINKS_MBIT_S, 1),
    ]


def repeats(setting: Setting, method: str, mbit_s: int | None) -> int:
    """Full transfers over the slow link take most of a minute each."""
    if method == "full" and mbit_s is not None and mbit_s < 1000:
        return 1 if setting.slow_full else 0
    return setting.repeats if method == "ours" else max(1, setting.repeats // 2)


def joiners(setting: Setting, method: str, mbit_s: int | None) -> int:
    """How many join late, one after the other; all the weights over the slow link take too long for that too."""
    if not setting.late_joiner or method not in ("ours", "full"):
        return 0
    if method == "full":
        return 1 if mbit_s is None or mbit_s >= 1000 else 0
    return 3 if mbit_s is None else 1


def bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    def one(method: str, mbit_s: int | None) -> dict[str, Any]:
        found = [row for row in rows if (row["case"], row["relay"], row["method"], row["link_mbit_s"], row["receivers"])
                 == ("step", "http", method, mbit_s, 1)]  # fmt: skip
        return found[0] if found else {}

    ours = [row for row in rows if row["case"] == "step" and row["method"] == "ours" and row["total_s"] is not None]
    extra = [row["peak_extra_mb"] - row["parameters"] * 2 / MIB for row in ours]
    pause_ms = one("ours", None).get("pause_s")
    return [
        harness.wanted("pause in ms, one receiver at 500M", _times(pause_ms, 1e3), 50, at_most=True),
        harness.wanted("2 Gbit/s: times faster than full", one("ours", 2000).get("ratio_full_time"), 5),
        harness.wanted("200 Mbit/s: times faster than full", one("ours", 200).get("ratio_full_time"), 25),
        harness.wanted("MB of memory beyond one bf16 copy", max(extra, default=None), 256, at_most=True),
    ]


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
