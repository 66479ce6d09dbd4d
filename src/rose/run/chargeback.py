"""The bill between the lender of a device and the run that borrowed it: seconds, tokens, losses, and US dollars.

The device counts what it lends, and the run records that with every step (`LentRecord`). Dollars are those of
`rose.cost.bill` for the same steps, so that both bills agree: what the owner bears, and what is charged for the time.
Losses are the device's own count; without one they are estimated from the requests of users, and the bill says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from rose.bounds import Finite, Label, Seconds, Serial, Text
from rose.config.loading import RESOLVED_NAME
from rose.cost.bill import HOUR_S, CostSettings, bill_of
from rose.errors import ConfigError
from rose.run.process_specs import BORROWED
from rose.run.resume_filter import counted
from rose.run.run_records import LendingRecord, LentRecord, RunRecord, StepRecord, of_kind, read_records, read_served
from rose.run.run_statistics import usage_of_run
from rose.run.serving_traffic import UserRequest
from rose.run.summary import priced_by

LossesBasis = Literal["counted", "estimated"]


class LenderBill(msgspec.Struct, frozen=True, kw_only=True):
    """What one device lent to one run. `lent_*` is None for a run that did not record the device's count."""

    lender: Label
    borrower: Text
    steps: Serial  # of training, with the device
    borrowed_s: Seconds  # of these steps
    borrowed_rollout_s: Seconds  # of their rollouts
    turns: Serial  # that ended on the device
    lent_s: Seconds | None = None  # in rollout steps
    lent_tokens: Serial | None = None  # computed in them, prompts too
    lent_steps: Serial | None = None
    evicted_tokens: Serial | None = None  # of these, computed and thrown away
    lost: Finite  # requests that lending made late
    ambiguous: Serial  # requests that it may have made late
    losses_basis: LossesBasis
    energy_usd: Finite
    transfer_usd: Finite
    headroom_usd: Finite
    losses_usd: Finite
    charged_usd: Finite  # of the device's price, for the time of the rollouts

    @property
    def borne_usd(self) -> float:
        """Return what the owner bears because the device lends."""
        return self.energy_usd + self.transfer_usd + self.headroom_usd + self.losses_usd

    @property
    def due_usd(self) -> float:
        return self.borne_usd + self.charged_usd


def chargeback(
    borrower: str,
    lines: Sequence[RunRecord],
    served: Sequence[UserRequest],
    prices: CostSettings,
    headroom_share: float,
) -> LenderBill | None:
    """Return the bill of the borrowed device; None if the run has no step with it."""
    steps = [step for step in of_kind(lines, StepRecord) if step.is_borrowed]
    if not any(step.turns_by_pool.get(BORROWED, 0) for step in steps):
        return None
    usage = usage_of_run(lines, served, headroom_share)
    bill = bill_of(usage, prices)
    late, lent = of_kind(lines, LendingRecord), of_kind(lines, LentRecord)
    breaches = late[-1].breaches if late else {}
    counts = lent[-1].counts if lent else {}
    ambiguous = breaches.get("ambiguous", 0)
    return LenderBill(
        lender=lent[-1].lender if lent else BORROWED,
        borrower=borrower,
        steps=len(steps),
        borrowed_s=usage.lent_s,
        borrowed_rollout_s=usage.lent_rollout_s,
        turns=usage.borrowed_turns,
        lent_s=counts["milliseconds"] / 1000 if "milliseconds" in counts else None,
        lent_tokens=counts.get("tokens"),
        lent_steps=counts.get("steps"),
        evicted_tokens=counts.get("evicted_tokens"),
        lost=usage.breaches - ambiguous,
        ambiguous=ambiguous,
        losses_basis="counted" if late else "estimated",
        energy_usd=bill.energy,
        transfer_usd=bill.transfer,
        headroom_usd=bill.headroom,
        losses_usd=bill.slo_risk,
        charged_usd=usage.lent_rollout_s / HOUR_S * prices.serving_usd_per_hour * prices.charged_share,
    )


def bill_of_folder(name: str, path: Path) -> LenderBill:
    """Return the bill of a run in a folder. Raises ConfigError if it has no records or borrowed nothing."""
    metrics, serving = path / "metrics.jsonl", path / "serving.jsonl"
    if not metrics.exists():
        raise ConfigError(f"run {name} has no records in {path}", hint="`rose runs ls` lists those that have")
    try:
        lines = counted(read_records(metrics))
        served = read_served(serving) if serving.exists() else []
    except (msgspec.ValidationError, OSError) as error:
        raise ConfigError(f"the records of run {name} cannot be read: {error}", hint="see its folder") from error
    bill = chargeback(name, lines, served, *priced_by(path / RESOLVED_NAME))
    if bill is None:
        raise ConfigError(f"run {name} borrowed nothing: there is no bill", hint="run with a serving device to borrow")
    return bill
