"""A rank of the trainer beside rank 0: does what rank 0 orders until that ends.

    python -m rose.run.trainer_rank     as `rose run` starts it, with its plan on the standard input
    torchrun ... -m rose run ...        the same program on every rank; those above 0 become this

A rank that finds another one gone ends too. So every rank learns it, whichever ranks it is connected to.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from rose.errors import ConfigError, RoseError
from rose.train.train_settings import TrainSettings

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"


class RankPlan(msgspec.Struct, frozen=True):
    """What a rank must know to meet the others; the secret signs what it publishes."""

    rank: int
    train: TrainSettings
    meeting: str | None = None
    secret: bytes | None = None


def rank_of_torchrun(ranks: int) -> int | None:
    """Return the rank that torchrun gave this process, or None if torchrun did not start it.

    Raises ConfigError if it started another number of ranks.
    """
    if (ranks == 1 and STARTED_BY_TORCHRUN not in os.environ) or any(name not in os.environ for name in TORCHRUN):
        return None
    rank, started = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not rank.isdecimal() or started != str(ranks):
        what = f"train.ranks is {ranks}, and the environment says RANK={rank[:20]} of WORLD_SIZE={started[:20]}"
        raise ConfigError(what, hint="give both the same number, or unset RANK and WORLD_SIZE without torchrun")
    return int(rank)


def follow(plan: RankPlan) -> int:
    """Do what rank 0 orders, and return the exit code: 0 if rank 0 let this rank go. Raises Unavailable."""
    from rose.run.trainer_ranks import EndOrder, Order, RankWorker
    from rose.train.ranks import Ranks

    ranks = Ranks(plan.rank, plan.train, Path(plan.meeting) if plan.meeting is not None else None)
    worker = RankWorker(ranks, plan.secret)
    print(f"rank {plan.rank} of {plan.train.ranks} is in place", flush=True)
    while True:
        order = msgspec.msgpack.decode(ranks.receive_order(), type=Order)
        if isinstance(order, EndOrder):
            ranks.leave()
            return 0
        try:
            worker.obey(order)
        except RoseError as error:  # rank 0 has it too, and decides what becomes of the run
            print(f"{type(order).__name__}: {error}", file=sys.stderr, flush=True)
            if worker.is_alone:
                return error.exit_code


def main() -> None:
    try:
        code = follow(msgspec.json.decode(sys.stdin.buffer.read(), type=RankPlan))
    except RoseError as error:
        print(error, file=sys.stderr, flush=True)
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)  # threads of collectives may still wait for a rank that is gone


if __name__ == "__main__":
    main()
