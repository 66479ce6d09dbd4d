"""How long new weights take from the trainer to every worker, and how long the workers stand still, in one run.

Publisher, relay and receivers are processes of their own. Every version changes about 1.2 % of bf16 weights (steps of
about one ULP, as at RL learning rates); a receiver runs on the version before, in a thread that steps, and swaps
between two steps. `total_s` is from the call of `publish` to the swap of the last receiver; `pause_s` is how long the
engine's thread did nothing but swap. `ours` is our codec, `coo` what the paper sends, `full` all the weights; all three
go through the same chain, relay and checks. tcp and object links are shaped (syncing/links.py) on the receivers' side.

A late joiner is a new process that holds nothing: `total_s` is its fetch alone, and `kernel_s` what of it the system
spent on this process, most of it on pages of memory that nobody wrote before.

Every transfer is checked: the receivers must arrive at the hash that the publisher published.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from typing import Any

import harness
from syncing import plan
from syncing.driving import METHODS, Cluster, cluster
from syncing.links import Link
from syncing.plan import Setting
from syncing.stores import missing, store

from rose.errors import RoseError

COLUMNS = (
    "case", "relay", "receivers", "link_mbit_s", "method", "total_s", "publish_s", "receive_s", "encode_s", "push_s",
    "fetch_s", "decode_s", "kernel_s", "prepare_s", "pause_s", "bytes", "ratio_full_time", "ratio_full_joiner",
    "peak_extra_mb", "why",
)  # fmt: skip
SHAPED = ("http", "object")
EMPTY = dict.fromkeys(("total_s", "pause_s", "bytes", "ratio_full_time", "peak_extra_mb"))


def main() -> int:
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--relays", nargs="+", choices=["http", "object", "filesystem", "mooncake"], help="only these")
    parser.add_argument("--parameters", type=int, help="this many in every setting, for a look")
    parser.add_argument("--limit-s", type=float, help="begin no setting after this (1080, or 240 with --quick)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started and made is removed
    begun, rows, begin_s = harness.machine(), [], time.monotonic()
    limit_s = arguments.limit_s or (240 if arguments.quick else 1080)
    with Link() as link:
        for setting in plan.settings(arguments.quick):
            if arguments.relays and setting.relay not in arguments.relays:
                continue
            is_late = time.monotonic() - begin_s > limit_s
            found = [not_measured(setting, "out of time")] if is_late else attempt(link, setting, arguments)
            rows += found
            harness.print_table(found, COLUMNS)
            print(flush=True)
        shaping, why_not = link.shaping, link.why_not
    return harness.finish(arguments, "sync", rows, plan.bars(rows), begun, shaping=shaping, shaping_why=why_not,
                          seconds=round(time.monotonic() - begin_s))  # fmt: skip


def attempt(link: Link, setting: Setting, arguments: Any) -> list[dict[str, Any]]:
    """What cannot be measured here is a row with its reason, and the others go on."""
    why = missing(setting.relay)
    if why:
        return [not_measured(setting, why)]
    try:
        return measure(link if setting.relay in SHAPED else Link.none(), setting, arguments)
    except (RoseError, RuntimeError, OSError) as error:
        return [not_measured(setting, f"{type(error).__name__}: {error}".splitlines()[0])]


def measure(link: Link, setting: Setting, arguments: Any) -> list[dict[str, Any]]:
    parameters = arguments.parameters or setting.parameters
    rows = []
    with cluster(link, parameters, setting.receivers, arguments.seed) as ends:
        for method in METHODS:
            with store(setting.relay, link) as where:
                rows += measure_method(ends, setting, where, method)
    put_ratios(rows)
    return rows


def measure_method(ends: Cluster, setting: Setting, where: dict[str, Any], method: str) -> list[dict[str, Any]]:
    """One method on every link; the first transfer is not counted."""
    run = f"{setting.relay}-{method}"
    share = ends.open(where, run, method)
    ends.transfer()
    rows = []
    for mbit_s in setting.links_mbit_s:
        head = {"relay": setting.relay, "parameters": ends.parameters, "receivers": setting.receivers,
                "link_mbit_s": mbit_s, "method": method, "changed_share": round(share, 5)}  # fmt: skip
        count = plan.repeats(setting, method, mbit_s)
        ends.link.shape(mbit_s)
        found = [ends.transfer() for _ in range(count)]
        rows.append({"case": "step", **head, **summary(found)})
        joined = [ends.late_joiner(where, run, method) for _ in range(plan.joiners(setting, method, mbit_s))]
        if joined:
            rows.append({"case": "late joiner", **head, **summary(joined)})
    ends.link.shape(None)
    return rows


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    if not found:
        return {**EMPTY, "why": "not run at this rate: it takes as long as the weights are large"}
    row = {name: _rounded(statistics.median(one[name] for one in found)) for name in found[0]}
    low, high = min(one["total_s"] for one in found), max(one["total_s"] for one in found)
    return {**row, "total_s_low": _rounded(low), "total_s_high": _rounded(high), "repeats": len(found)}


def put_ratios(rows: list[dict[str, Any]]) -> None:
    """Against the full transfer in the same setting, on the same link; a late joiner also against one who reads it all.

    The transfer is published first and goes to memory that was written before; the joiners both begin with nothing.
    """
    done = [row for row in rows if row["method"] == "full" and row["total_s"] is not None]
    full = {row["link_mbit_s"]: row for row in done if row["case"] == "step"}
    joined = {row["link_mbit_s"]: row for row in done if row["case"] == "late joiner"}
    for row in rows:
        whole, joiner = full.get(row["link_mbit_s"]), joined.get(row["link_mbit_s"])
        if row["case"] == "late joiner" and joiner is not None:
            row["ratio_full_joiner"] = round(joiner["total_s"] / row["total_s"], 2)
        if row["total_s"] is None:
            continue
        if whole is None:
            row |= {"ratio_full_time": None, "why": "no ratio: the full transfer was not run at this rate"}
            continue
        row["ratio_full_time"] = round(whole["total_s"] / row["total_s"], 2)
        row["ratio_full_time_low"] = round(whole["total_s_low"] / row["total_s_high"], 2)
        row["ratio_full_time_high"] = round(whole["total_s_high"] / row["total_s_low"], 2)


def not_measured(setting: Setting, why: str) -> dict[str, Any]:
    return {"case": "step", "relay": setting.relay, "parameters": setting.parameters, "receivers": setting.receivers,
            "link_mbit_s": None, "method": None, **EMPTY, "why": why}  # fmt: skip


def _rounded(value: float) -> float:
    return round(value, 6) if abs(value) < 1 else round(value, 3)


if __name__ == "__main__":
    sys.exit(main())
