"""Where a run begins: a new one from nothing, one that is resumed from what its checkpoint says beside the weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.launch.ledger import Balance
from rose.models.files import Keys
from rose.train.checkpoint_state import read_state

if TYPE_CHECKING:
    from rose.weights.publish import Published


@dataclass(frozen=True, slots=True)
class Start:
    """`step` steps are done. As it is made, a new run's."""

    step: int = 0
    version: int = 0
    epoch: int = 0  # of the weights: that of the trainer before
    next_group: int = 0
    outstanding: tuple[int, ...] = ()  # groups that were drawn and that no step has learnt from
    balance: Balance = field(default_factory=Balance)
    checkpoint: Path | None = None
    is_evaluated: bool = False  # the evaluation behind `step` was done

    def shown(self) -> dict[str, Any]:
        """For the `resume` line."""
        name = self.checkpoint.name if self.checkpoint is not None else None
        return {"step": self.step, "version": self.version, "next_group": self.next_group, "checkpoint": name}


def start_to_keep(step: int, published: Published, rollouts: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says beside the trainer's own, for `read_start`. `rollouts` is `Rollouts.state()`."""
    version = published.version
    return {
        "run_step": step,
        "version": version.version,
        "epoch": version.epoch,
        "hash": published.hash,
        **rollouts,
    }


def read_start(checkpoint: Path) -> Start:
    """Raises ModelError unless the checkpoint is whole."""
    extra = read_state(checkpoint).inner("extra")
    balance, next_group = extra.inner("balance"), extra.whole("next_group", minimum=0)
    return Start(
        step=extra.whole("run_step", minimum=0),
        version=extra.whole("version", minimum=0),
        epoch=extra.whole("epoch", minimum=0),
        next_group=next_group,
        outstanding=_outstanding(extra, next_group),
        balance=Balance(**{key: balance.whole(key, minimum=0) for key in asdict(Balance())}),
        checkpoint=checkpoint,
    )


def _outstanding(extra: Keys, next_group: int) -> tuple[int, ...]:
    """Checkpoints of earlier versions say nothing of them."""
    found = extra.get("outstanding", [])
    if not isinstance(found, list) or not all(type(group) is int and 0 <= group < next_group for group in found):
        raise extra.complaint("outstanding", f"must be a list of groups before {next_group}")
    return tuple(found)
