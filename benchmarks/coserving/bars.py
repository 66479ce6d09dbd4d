"""What was wanted of a run, and whether it was reached.

Attainment counts at both budgets, everything else at the given one. Lending is *non-inferior* if the 95 % interval of
the difference to serving alone, paired by request and with its two runs pooled, lies above -0.5 points; a mode
*loses* if the difference itself lies below. In the worst case two runs of serving alone differ by points, as the queue
is a random walk. There the device's own accountant is asked too: which requests missed a deadline for what was lent,
or may have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import harness

from coserving.figures import Findings, difference, pooled, verdicts
from coserving.pairing import PairedDifference
from coserving.plan import ALONE

TOLERANCE = 0.005
SPREAD_MAX = 0.01
BUDGET_USED_MAX, ALONE_USES_MAX = 0.85, 0.6
NO_WASTE, LENDING_GAIN, HARVEST_SHARE = 0.9, 1.03, 0.5
NAIVE = ("alternate", "fcfs", "paper")


def losses(findings: Findings, modes: Sequence[str]) -> dict[str, PairedDifference | None]:
    """For every mode the difference of attainment to serving alone; None where there is nothing to compare."""
    alone = pooled(*(verdicts(findings, mode) for mode in ALONE))
    found = {mode: difference(alone, verdicts(findings, mode)) for mode in modes}
    return {mode: None if math.isnan(value.mean) else value for mode, value in found.items()}


def bars_of(
    rows: Mapping[str, dict[str, Any]],
    overall: Mapping[str, Any],
    lost: Mapping[str, PairedDifference | None],
    *,
    load: str,
    budget: str,
    is_worst_case: bool = False,
) -> list[dict[str, Any]]:
    """Those that apply to this load and budget."""
    bars = [_non_inferior("decode", lost.get("decode")), _not_void(overall)]
    if is_worst_case:
        return [*bars, _by_the_ledger(rows.get("decode", {}))]
    if budget != "given":
        return bars
    bars += [_budget_used(rows, name) for name in ("ttft", "tpot")]
    bars.append(_reasoned("no_waste", overall, NO_WASTE))
    if load == "busy:0.2":
        bars.append(_reasoned("lending_gain", overall, LENDING_GAIN))
    if load == "capacity:0.2":
        bars.append(_reasoned("harvest_share", overall, HARVEST_SHARE))
    return [*bars, _naive_loses(lost)]


def _non_inferior(mode: str, found: PairedDifference | None) -> dict[str, Any]:
    what = f"{mode}: attainment less that of serving alone, points"
    if found is None:
        return harness.wanted(what, None, -100 * TOLERANCE) | {"reason": "not measured"}
    if math.isnan(found.low):
        bar = harness.wanted(f"{what}, n = {found.pairs}", round(100 * found.mean, 3), -100 * TOLERANCE)
        return bar | {"reason": "too short for an interval: this is the difference itself"}
    what = f"{what}, low end of its 95 % interval, n = {found.pairs}"
    return harness.wanted(what, round(100 * found.low, 3), -100 * TOLERANCE)


def _by_the_ledger(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the device itself holds against lending, in doubt against it: it needs no second run to compare with."""
    counted = [row.get(key) for key in ("late_requests", "ambiguous", "requests")]
    points = None if None in counted or not counted[2] else round(100 * (counted[0] + counted[1]) / counted[2], 3)
    what = "decode: requests late for what was lent, or perhaps for that, points"
    return harness.wanted(what, points, 100 * TOLERANCE, at_most=True)


def _not_void(overall: Mapping[str, Any]) -> dict[str, Any]:
    what = "A/A spread, a share (above it the run is void)"
    bar = harness.wanted(what, overall["aa_spread"], SPREAD_MAX, at_most=True)
    if overall["aa_spread"] is None:  # a short run: nothing to hold against it
        bar |= {"ok": True, "reason": overall["reasons"].get("aa_spread")}
    return bar


def _budget_used(rows: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    key = f"budget_used_{name}"
    alone = [rows[mode][key] for mode in ALONE if mode in rows and rows[mode][key] is not None]
    value = rows.get("decode", {}).get(key)
    bar = harness.wanted(f"decode: {key}", value, BUDGET_USED_MAX, at_most=True)
    if alone and max(alone) >= ALONE_USES_MAX:
        bar |= {"ok": True, "reason": f"serving alone already uses {max(alone):.2f} of it: the bar does not apply"}
    return bar


def _reasoned(key: str, overall: Mapping[str, Any], bar: float) -> dict[str, Any]:
    found = harness.wanted(f"decode: {key}", overall[key], bar)
    return found | ({"reason": overall["reasons"][key]} if key in overall["reasons"] else {})


def _naive_loses(lost: Mapping[str, PairedDifference | None]) -> dict[str, Any]:
    """The worst of the simple ways must lose where `decode` does not, or the trace does not tell them apart."""
    known = {mode: found.mean for mode in NAIVE if (found := lost.get(mode)) is not None}
    what = f"worst of {', '.join(NAIVE)} where decode does not lose: attainment less that of serving alone, points"
    decode = lost.get("decode")
    if not known or decode is None:
        return harness.wanted(what, None, -100 * TOLERANCE, at_most=True) | {"reason": "not measured"}
    worst = min(known, key=lambda mode: known[mode])
    bar = harness.wanted(what, round(known[worst] * 100, 3), -100 * TOLERANCE, at_most=True)
    return bar | {"ok": known[worst] < -TOLERANCE <= decode.mean, "mode": worst}
